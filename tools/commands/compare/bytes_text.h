// Bytes as compare's table and page show them.
#pragma once

#include <cmath>
#include <string>

#include "tools/terminal/units.h"

namespace keyhole::tools {

/// "-" for NaN.
[[nodiscard]] inline std::string bytes_text(double bytes) {
  return std::isnan(bytes) ? "-" : format_bytes(static_cast<uint64_t>(bytes));
}

}  // namespace keyhole::tools
