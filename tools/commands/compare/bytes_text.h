// Bytes as text in compare's table and page.
#pragma once

#include <cmath>
#include <string>

#include "tools/terminal/units.h"

namespace keyhole::tools {

/// The bytes with a unit; "-" for NaN.
[[nodiscard]] inline std::string bytes_text(double bytes) {
  return std::isnan(bytes) ? "-" : format_bytes(static_cast<uint64_t>(bytes));
}

}  // namespace keyhole::tools
