// Threads that keep a machine's memory busy while something else is timed.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "tools/terminal/clock.h"

namespace keyhole::tools {

/// Each thread copies a block of memory of its own, beyond what a core caches, over and over. That is how a host
/// looks that serves more than one job: cores and memory bandwidth are taken, and a thread that is woken waits for
/// its turn.
class BusyThreads {
 public:
  /// Starts the threads, and returns when every thread has copied once, so that no page is new any more. Each reads
  /// `block_bytes` and writes as much.
  explicit BusyThreads(uint32_t threads, size_t block_bytes = size_t{64} << 20U);
  ~BusyThreads();
  BusyThreads(const BusyThreads&) = delete;
  BusyThreads& operator=(const BusyThreads&) = delete;

  /// Ends the threads. Returns the bytes per second that all of them together read and wrote between the end of the
  /// constructor and the first call of stop().
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
