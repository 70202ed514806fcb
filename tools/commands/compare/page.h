// compare's results as a page and as a picture. Both are made from the JSON result alone, so they cannot say anything
// else.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace keyhole::tools {

/// A page with curves, heat maps of heads, all figures and the command.
[[nodiscard]] std::string compare_page(const nlohmann::ordered_json& document);

/// One SVG file of two panels: output error (or recall where the trace has no values, which an output needs) against
/// the bytes that a step reads, and against median latency. A line for each --index and budget, a point for each spec
/// of its sweep.
[[nodiscard]] std::string compare_svg(const nlohmann::ordered_json& document);

}  // namespace keyhole::tools
