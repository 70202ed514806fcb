// Threads that keep a machine's memory busy while something else is timed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tools/terminal/clock.h"

namespace keyhole::tools {

/// Bytes that each thread reads, and that it writes.
inline constexpr size_t kBusyBlock = size_t{64} << 20U;

/// Memory that this process may take now without pushing other things out: of the machine, and of the control group
/// where that has a limit.
[[nodiscard]] uint64_t available_memory();

/// Why so many threads cannot copy: what their blocks take and what there is; empty where they can.
[[nodiscard]] std::string busy_refusal(uint32_t threads, uint64_t available);

/// Each thread copies a block of memory of its own, beyond what a core caches, over and over. That is how a host
/// looks that serves more than one job: cores and memory bandwidth are taken, and a thread that is woken waits for
/// its turn.
class BusyThreads {
 public:
  /// Starts the threads, and returns when every thread has copied once, so that no page is new any more. Each reads
  /// `block_bytes` and writes as much. Throws where there are no memory and threads for that.
  explicit BusyThreads(uint32_t threads, size_t block_bytes = kBusyBlock);
  ~BusyThreads();
  BusyThreads(const BusyThreads&) = delete;
  BusyThreads& operator=(const BusyThreads&) = delete;

  /// Ends the threads. Returns the bytes per second that all of them together read and wrote between the end of the
  /// constructor and the first call of stop().
  double stop();

 private:
  struct Blocks {
    std::unique_ptr<char[]> from, to;
  };
  void copy_until_stopped(Blocks blocks, size_t block_bytes);
  void join();

  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> warm_{0};
  std::atomic<uint64_t> bytes_{0};
  uint64_t bytes_at_start_ = 0;
  Clock::time_point start_;
  double bandwidth_ = 0;
};

}  // namespace keyhole::tools
