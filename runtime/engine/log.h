// The caller's log callback; silent without one.
#pragma once

#include <string>

#include "keyhole/keyhole.h"

namespace keyhole::runtime {

struct Log {
  keyhole_log_fn fn = nullptr;
  void* user = nullptr;

  void operator()(int32_t level, const std::string& text) const {
    if (fn != nullptr) fn(user, level, text.c_str());
  }
};

}  // namespace keyhole::runtime
