// Reads numbers of options.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace keyhole::tools {

/// Whether `text` is a number of this type and nothing else.
template <class T>
[[nodiscard]] bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace keyhole::tools
