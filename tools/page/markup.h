// Text and numbers in HTML and SVG. All texts of users or files pass through escaped() or json_in_page().
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace keyhole::tools {

/// `text` as the content of an element or of an attribute in double quotes: markup escaped, bytes that are no UTF-8 and
/// control characters other than line ends and tabs replaced by U+FFFD, which XML cannot hold otherwise.
[[nodiscard]] std::string escaped(std::string_view text);

/// An attribute ` name="value"`, escaped.
[[nodiscard]] std::string attribute(std::string_view name, std::string_view value);

/// A coordinate with two decimals.
[[nodiscard]] std::string coordinate(double x);

/// A value in full: read back, it gives the same double.
[[nodiscard]] std::string exact_number(double value);

/// JSON for a <script> element: nothing in it ends that element, whatever its strings hold. NaN becomes null.
[[nodiscard]] std::string json_in_page(const nlohmann::ordered_json& value);

}  // namespace keyhole::tools
