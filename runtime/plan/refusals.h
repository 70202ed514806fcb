// The exceptions of this folder, by status.
#pragma once

#include <string>

#include "cpu/types.h"

namespace keyhole::runtime {

[[noreturn]] inline void bad(const std::string& text) {
  throw Error(Status::invalid_argument, text);
}
[[noreturn]] inline void corrupt(const std::string& text) { throw Error(Status::corrupt, text); }

}  // namespace keyhole::runtime
