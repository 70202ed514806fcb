// How a host thread waits for something that the device writes into pinned memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace keyhole::gpu {

[[nodiscard]] inline uint32_t load_acquire(const uint32_t& flag) {
  return std::atomic_ref(const_cast<uint32_t&>(flag)).load(std::memory_order_acquire);
}
inline void store_release(uint32_t& flag, uint32_t value) {
  std::atomic_ref(flag).store(value, std::memory_order_release);
}

/// Whether `flag` counts to `sequence` or beyond; the count is cyclic.
[[nodiscard]] inline bool has_reached(uint32_t flag, uint32_t sequence) {
  return static_cast<int32_t>(flag - sequence) >= 0;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits until ready() is true: spins for spin_us, then sleeps between looks (a sleep takes about 50 us longer than it
/// is set to). False if stop() was true or timeout_us passed first.
template <class Ready, class Stop>
[[nodiscard]] bool wait_until(Ready&& ready, uint64_t spin_us, uint64_t timeout_us, Stop&& stop) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kNap = std::chrono::microseconds(20);
  constexpr int kLooks = 32;  // between two looks at the clock
  // After this time the thread yields at every look. Another thread on the same core, whose work this one may be
  // waiting for, would otherwise wait for a time slice of 4 ms.
  constexpr auto kAlone = std::chrono::microseconds(20);
  const auto start = Clock::now();
  while (true) {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
      pause_cpu();
    }
    if (stop()) return false;
    const auto passed = Clock::now() - start;
    if (passed >= std::chrono::microseconds(timeout_us)) return ready();
    if (passed >= std::chrono::microseconds(spin_us)) {
      std::this_thread::sleep_for(kNap);
    } else if (passed >= kAlone) {
      std::this_thread::yield();
    }
  }
}

}  // namespace keyhole::gpu
