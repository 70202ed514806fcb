// Warnings: what a person should know although the work goes on.
#pragma once

#include <string>

namespace keyhole::tools {

/// Prints "keyhole: warning: TEXT" on stderr, as errors are shown.
void warn(const std::string& text);

}  // namespace keyhole::tools
