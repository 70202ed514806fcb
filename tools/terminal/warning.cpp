#include "tools/terminal/warning.h"

#include <cstdio>

#include "tools/terminal/style.h"

namespace keyhole::tools {

void warn(const std::string& text) {
  std::fprintf(stderr, "keyhole: %s %s\n",
               tinted("warning:", Tint::yellow, style_of(stderr)).c_str(), text.c_str());
}

}  // namespace keyhole::tools
