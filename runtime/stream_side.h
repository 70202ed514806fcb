// What a session has beside it where its device has streams: the thread that serves steps, the partitions on the
// device, what was captured, and what went wrong.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/copy.h"
#include "gpu/device.h"
#include "runtime/stream_server.h"

namespace keyhole::runtime {

/// The first failure of stream steps: set by the serving thread, read by calls.
class StreamFailure {
 public:
  void set(Status status, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    status_ = status;
    text_ = text;
    failed_.store(true, std::memory_order_release);
  }
  [[nodiscard]] explicit operator bool() const { return failed_.load(std::memory_order_acquire); }
  void rethrow() const {
    if (!*this) return;
    const std::lock_guard lock(mutex_);
    throw Error(status_, text_);
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> failed_{false};
  Status status_ = Status::ok;
  std::string text_;
};

struct StreamSide {
  StreamSide(gpu::StreamSteps& s, uint32_t layers, cpu::Pool& pool, uint32_t spin_us,
             StreamServer::Serve serve)
      : steps(s), sequences(layers), tickets(layers), server(pool, spin_us, std::move(serve)) {}

  /// Ends whatever the device still waits for, once the thread has gone.
  void give_up_all() {
    for (uint32_t l = 0; l < sequences.size(); ++l) steps.give_up(l, sequences[l]);
  }

  gpu::StreamSteps& steps;
  gpu::Stream stream = nullptr;
  std::vector<uint32_t> sequences;  ///< [layer] steps submitted, cyclic
  std::vector<uint32_t> tickets;    ///< [layer] of the last of them
  StreamFailure failure;
  std::unique_ptr<gpu::HostCopies> copies;  ///< of device tensors; null: none yet

  // Partitions on the device.
  std::unique_ptr<gpu::Partitions> front;  ///< null: none
  uint32_t front_room = 0;                 ///< partitions of a head
  std::vector<uint32_t> front_counts;      ///< [layer * kv_heads + kv_head] uploaded
  std::vector<bool> front_layers;          ///< [layer] some head has its partitions chosen there
  bool front_refused =
      false;                ///< there was no room; not tried again until a build or another budget
  bool front_stale = true;  ///< heads, budgets or partitions have changed

  // What the last capture holds.
  std::vector<StreamStep> captured;
  bool capturing = false;
  uint64_t captured_version = 0;
  uint64_t version = 1;  ///< changes with all that a graph has in it

  // Between attend_begin and attend_end.
  bool open = false;
  uint32_t open_layer = 0;

  double serve_seconds = 0.0;
  uint64_t waited_before = 0;  ///< nanoseconds, at the last reset of statistics

  StreamServer server;  // last: ends before all that it reads
};

}  // namespace keyhole::runtime
