// The thread of a session that serves the host's part of stream steps: steps are submitted in the order in which
// the stream will come to them, and served one after the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "cpu/pool.h"

namespace keyhole::runtime {

struct StreamStep {
  uint32_t layer = 0;
  uint32_t sequence = 0;  ///< the layer's step number
  bool appends = false;
  bool device_chooses = false;  ///< the device chooses partitions for the host to read
  bool coded = false;  ///< the device attends everything: the host takes k and v in, no more
};

class StreamServer {
 public:
  using Serve = std::function<void(const StreamStep&)>;
  /// Steps that can be under way at once: four tokens of the deepest model.
  static constexpr uint32_t kCapacity = 4096;

  /// `serve` is called on the server's thread and throws nothing. While there are steps to serve the pool stays
  /// awake; without any the thread spins for spin_us and then sleeps. Throws Error(out_of_memory) where the system
  /// gives no thread.
  StreamServer(cpu::Pool& pool, uint32_t spin_us, Serve serve);
  ~StreamServer() { stop(); }
  StreamServer(const StreamServer&) = delete;
  StreamServer& operator=(const StreamServer&) = delete;

  /// Ends the thread; steps that are not served are dropped. Idempotent.
  void stop();

  /// From one thread at a time. Waits where kCapacity steps are under way. Returns the step's ticket.
  uint32_t submit(const StreamStep& step);
  /// Waits until the step with this ticket, and all before, are served. From one thread at a time.
  void wait(uint32_t ticket);
  /// Waits for all that were submitted.
  void drain() { wait(static_cast<uint32_t>(submitted_.load(std::memory_order_relaxed))); }

 private:
  void work();

  cpu::Pool* pool_;
  uint32_t spin_us_;
  Serve serve_;
  std::vector<StreamStep> ring_;
  std::atomic<bool> stop_{false};
  // Counts, cyclic. int: the type that atomic::wait hands to the futex without a proxy.
  alignas(64) std::atomic<int> submitted_{0};
  alignas(64) std::atomic<int> served_{0};
  // The caller's thread is woken once, not at every step: each time it would take a core from a worker.
  std::atomic<int> wanted_{0};
  std::atomic<bool> waiting_{false};
  std::thread thread_;
};

}  // namespace keyhole::runtime
