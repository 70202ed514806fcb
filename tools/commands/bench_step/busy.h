// Threads that keep a machine's memory busy while something else is timed.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "tools/terminal/clock.h"

namespace keyhole::tools {

/// Each thread copies a block of memory of its own, beyond what a core caches, over and over. A host that serves more than
/// one job looks like that: cores and memory bandwidth are taken, and whoever wakes a thread waits for its turn.
class BusyThreads {
 public:
  /// Returns when every thread has copied for the first time, so that no page is new any more. `block_bytes` is read and
  /// as much written.
  explicit BusyThreads(uint32_t threads, size_t block_bytes = size_t{64} << 20U);
  ~BusyThreads();
  BusyThreads(const BusyThreads&) = delete;
  BusyThreads& operator=(const BusyThreads&) = delete;

  /// Ends the threads. Returns the bytes per second that all of them read and wrote together since the constructor
  /// returned, that of the first call in later ones.
  double stop();

 private:
  void copy_until_stopped(size_t block_bytes);

  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> warm_{0};
  std::atomic<uint64_t> bytes_{0};
  uint64_t bytes_at_start_ = 0;
  Clock::time_point start_;
  double bandwidth_ = 0;
};

}  // namespace keyhole::tools
