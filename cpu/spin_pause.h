// A moment's rest for a thread that polls, without giving its core away.
#pragma once

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <thread>
#endif

namespace keyhole::cpu {

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // about as long as x86's pause; `yield` is a no-op on most cores
#else
  std::this_thread::yield();
#endif
}

}  // namespace keyhole::cpu
