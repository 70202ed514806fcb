// Shows text as it comes.
#pragma once

#include <cstdio>
#include <string>

namespace keyhole::tools {

/// Writes to standard output at once.
inline void show(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace keyhole::tools
