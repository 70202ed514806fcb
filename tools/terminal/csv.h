// Text in CSV.
#pragma once

#include <string>

namespace keyhole::tools {

/// A cell by RFC 4180: in quotes where it needs them, with quotes inside doubled.
[[nodiscard]] inline std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + "\"";
}

}  // namespace keyhole::tools
