// The caller's log callback; silent without one.
#pragma once

#include <new>
#include <string>

#include "keyhole/keyhole.h"

namespace keyhole::runtime {

struct Log {
  keyhole_log_fn fn = nullptr;
  void* user = nullptr;

  void operator()(int32_t level, const std::string& text) const {
    if (fn != nullptr) fn(user, level, text.c_str());
  }
  /// Says what `text()` returns, unless there is no memory for it. For where nothing may be thrown.
  template <class Text>
  void try_to(int32_t level, const Text& text) const noexcept {
    if (fn == nullptr) return;
    try {
      fn(user, level, text().c_str());
    } catch (const std::bad_alloc&) {  // NOLINT: there is nobody to tell
    }
  }
};

}  // namespace keyhole::runtime
