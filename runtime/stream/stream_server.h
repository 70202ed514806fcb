// Serves the host's part of stream steps: steps are submitted in the order in which the stream will come to them, and
// served one after the other, by a thread of the session.
//
// Or by the caller's thread, where that waits for steps that are light (StreamStep::coded: copies of a few KiB). A
// system whose cores are all busy gives the session's thread a core after some milliseconds, and the caller has one
// now. So a step is claimed only while it is served, never while somebody waits for its queries.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cpu/pool.h"

namespace keyhole::runtime {

/// Which of the newest tokens of some layers remain, see gpu::StreamSteps::keep_newest().
struct KeptTokens {
  std::vector<uint32_t> layers;
  uint32_t of = 0;
  std::vector<uint32_t> kept;
};

struct StreamStep {
  uint32_t layer = 0;
  uint32_t sequence = 0;  ///< the layer's step number
  uint32_t appends = 0;   ///< tokens
  bool coded = false;     ///< the device attends everything: the host takes k and v in, no more
  bool audited = false;   ///< in a KV head or more
  uint64_t number = 0;    ///< of an audited step: see StreamClient::count_step()
  /// Not null: no step, and nothing to wait for: the host's copy of these layers loses tokens.
  std::shared_ptr<const KeptTokens> keeps = nullptr;
};

class StreamServer {
 public:
  /// Whether a step can be served now: what it needs is here, or will not come. `waits`: returns when it can, else
  /// false if it cannot yet. From both threads at once, also for a step that the other one has just served; throws
  /// nothing.
  using Await = std::function<bool(const StreamStep&, bool waits)>;
  /// Serves a step that can be served; from one thread at a time, throws nothing.
  using Serve = std::function<void(const StreamStep&)>;
  /// Steps that can be under way at once: four tokens of the deepest model.
  static constexpr uint32_t kCapacity = 4096;

  /// While there are steps to serve the pool stays awake; without any the thread spins for spin_us and then sleeps.
  /// Throws Error(out_of_memory) where the system gives no thread.
  StreamServer(cpu::Pool& pool, uint32_t spin_us, Await await, Serve serve);
  ~StreamServer() { stop(); }
  StreamServer(const StreamServer&) = delete;
  StreamServer& operator=(const StreamServer&) = delete;

  /// Ends the thread; steps that are not served are dropped. Idempotent.
  void stop();

  /// From one thread at a time. Waits where kCapacity steps are under way. Returns the step's ticket.
  uint32_t submit(const StreamStep& step);
  /// Waits until the step with this ticket, and all before, are served; serves light ones itself. From the thread that
  /// submits.
  void wait(uint32_t ticket);
  /// Waits for all that were submitted.
  void drain() { wait(static_cast<uint32_t>(submitted_.load(std::memory_order_relaxed))); }

 private:
  void work();
  /// A copy, as its place in the ring is free for another step once somebody has served it; none: somebody has.
  [[nodiscard]] std::optional<StreamStep> step_at(int at);
  /// Serves step number `at`, which can be served, unless another thread does or has done so: then returns once it has.
  void serve(int at);
  /// The same for the caller's thread, which does not wait for the other one. True: the step is served.
  [[nodiscard]] bool help(int at);
  void serve_claimed(int at);
  /// Until the step with the ticket is served, or, where the caller can help, for a while.
  void sleep(uint32_t ticket, bool can_help);

  cpu::Pool* pool_;
  uint32_t spin_us_;
  Await await_;
  Serve serve_;
  std::vector<StreamStep> ring_;
  std::atomic<bool> stop_{false};
  // Counts, cyclic. int: the type that atomic::wait hands to the futex without a proxy.
  alignas(64) std::atomic<int> submitted_{0};
  alignas(64) std::atomic<int> served_{0};
  std::mutex serving_;  ///< held while a step is served, and while served_ moves
  // The caller's thread is woken once, not at every step: each time it would take a core from a worker.
  std::atomic<int> wanted_{0};
  std::atomic<bool> waiting_{false};
  std::mutex sleeping_;
  std::condition_variable awake_;
  std::thread thread_;
};

}  // namespace keyhole::runtime
