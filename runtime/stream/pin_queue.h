// Pinning of host memory beside the work of the session's thread.
//
// Batches of ranges are pinned one after the other by a thread of the queue's own. A range of 256 KiB takes the driver
// 42 us, one of 2 MiB 70 us and one of 64 MiB 1.4 ms, and a launch that comes meanwhile waits for it, but the thread
// that hands over a prompt does not wait for the 16 GiB of an 8B model at 128k. Where a range cannot be pinned the
// queue stops: what comes later would fail as well, and whoever owns the memory is to decide what goes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/pinned_memory.h"

namespace keyhole::runtime {

/// From one thread at a time.
class PinQueue {
 public:
  struct Range {
    const std::byte* data = nullptr;
    size_t bytes = 0;
  };

  explicit PinQueue(std::unique_ptr<gpu::PinnedMemory> memory) : memory_(std::move(memory)) {}
  /// Ends after the range under way, and unpins all.
  ~PinQueue();
  PinQueue(const PinQueue&) = delete;
  PinQueue& operator=(const PinQueue&) = delete;

  /// Adds a batch, of at least one range, and returns its number. The ranges are those of gpu::PinnedMemory::add();
  /// their memory stays mapped until they are dropped. Throws Error(out_of_memory) where there can be no thread.
  uint64_t add(std::vector<Range> ranges);
  /// Whether all of the batch is pinned. It was not dropped.
  [[nodiscard]] bool is_pinned(uint64_t batch) const {
    return batch < first_.load(std::memory_order_acquire);
  }
  /// Waits until it is; throws as check().
  void wait(uint64_t batch);
  /// Throws the error that the queue has stopped with, until resume(), if it is that of a batch up to `last`.
  void check(uint64_t last) const;
  /// Tries again what has failed.
  void resume();
  /// Unpins the batch, whose ranges are given again, whatever has become of it, or takes it out of the queue.
  void drop(uint64_t batch, const std::vector<Range>& ranges) noexcept;
  /// Of all ranges that are pinned.
  [[nodiscard]] size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Batch {
    uint64_t number = 0;
    std::vector<Range> ranges;
    size_t pinned = 0;  ///< of the ranges
  };
  void work();
  void unpin(const std::vector<Range>& ranges, size_t count) noexcept;
  /// first_, after the queue has changed.
  void publish();

  std::unique_ptr<gpu::PinnedMemory> memory_;  ///< used by whoever holds memory_mutex_
  std::mutex memory_mutex_;
  std::atomic<size_t> bytes_{0};

  mutable std::mutex mutex_;  ///< of all below
  std::condition_variable changed_;
  std::deque<Batch> queue_;
  uint64_t next_ = 1;               ///< number of the next batch
  std::atomic<uint64_t> first_{1};  ///< of the first batch in the queue, or next_
  std::exception_ptr failure_;      ///< the thread waits while there is one
  bool is_held_ = false;            ///< the thread is to wait
  bool is_working_ = false;         ///< on the first batch
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace keyhole::runtime
