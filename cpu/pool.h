// A worker pool for work of tens of microseconds: one parallel-for at a time per job, the caller takes
// part, hand-off in a few microseconds. Idle workers spin for a bounded time and then sleep on a futex.
//
// Why not oneTBB: a step hands over once per layer and more, in 0.21 us here and 0.60 us there. Builds take as long on
// either (0.93 to 1.06 times, bench/RESULTS.md), and stay here all the same: this pool is needed for steps anyway, and
// a second one would add threads beside a step's, which the limit, the pinning and children of fork(2) would have to
// know, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace keyhole::cpu {

struct PoolConfig {
  uint32_t threads = 0;  ///< all threads including the caller; 0: one per core this process may use
  bool pin = false;      ///< pin worker i to the i-th allowed core (the caller is never moved)
  uint32_t spin_us = 50;  ///< how long an idle worker spins before it sleeps; 0: sleep at once
  /// Where threads is 0: this many cores are left to others, as long as one is left to use.
  uint32_t spare = 0;
  /// Not null: jobs run on the caller's threads, and the pool starts none. Called by finish() and run() with count <=
  /// `threads`: it calls task(context, i) once for each i of [0, count), on any threads, at once or one after the
  /// other, and returns when all of these calls have returned; i is the worker number of what runs meanwhile. Called by
  /// several threads at once where finish() is. `pin` and `spin_us` mean nothing then.
  void (*run)(void* user, void (*task)(void* context, uint32_t i), void* context,
              uint32_t count) = nullptr;
  void* run_user = nullptr;
};

class Pool;

/// A parallel-for that is under way: the handle that start() fills and finish() empties. Owned by the
/// caller, reusable. Destroying it while it runs waits for its tasks (and drops their exception), so that
/// an exception between start() and finish() cannot leave workers with a context that is gone.
class Job {
 public:
  Job() = default;
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

 private:
  friend class Pool;
  Pool* pool_ = nullptr;  ///< not null: started and not yet finished
  uint32_t slot_ = 0;     ///< where the workers find it
  uint32_t count_ = 0;
  void (*task_)(void*, uint32_t, uint32_t) = nullptr;
  void* context_ = nullptr;
};

class Pool {
 public:
  static constexpr uint32_t kMaxThreads = 1024;

  /// Throws Error(invalid_argument) for more than kMaxThreads threads, Error(out_of_memory) where the
  /// system refuses to start one, Error(unsupported) where it refuses to pin one.
  explicit Pool(const PoolConfig& config);
  ~Pool();  ///< every job must have been finished
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Threads including the caller; a task's `worker` is in [0, threads()), 0 being the caller.
  [[nodiscard]] uint32_t threads() const;

  /// A task: fn(context, task, worker). Two tasks that run at once never share a `worker` number
  /// within one job.
  using Task = void (*)(void* context, uint32_t task, uint32_t worker);

  /// Runs tasks [0, count) and returns when all are done; allocates nothing. An exception thrown by a
  /// task is rethrown here (the first one; the other tasks still run). May be called from several
  /// threads at once, and from inside a task (then it runs inline on the calling worker's thread).
  void run(uint32_t count, Task task, void* context);

  /// run() for a callable `f(task, worker)`.
  template <class F>
  void run(uint32_t count, F&& f) {
    using Fn = std::remove_reference_t<F>;
    run(
        count,
        [](void* c, uint32_t task, uint32_t worker) { (*static_cast<Fn*>(c))(task, worker); },
        const_cast<void*>(static_cast<const void*>(std::addressof(f))));
  }

  /// While it lives, run() of this pool on this thread goes inline, as inside a task: for a thread whose
  /// long work must not take workers from short jobs. Nests; destroyed on the thread that made it.
  class Inline {
   public:
    explicit Inline(const Pool& pool);
    ~Inline();
    Inline(const Inline&) = delete;
    Inline& operator=(const Inline&) = delete;

   private:
    const void* outer_pool_;
    uint32_t outer_worker_;
  };

  /// While one lives, idle workers spin instead of falling asleep, and those that sleep are woken. For jobs in quick
  /// succession, whose pauses (a layer's other kernels on a device) are longer than spin_us and shorter than it takes
  /// to wake sixteen threads one after the other.
  class Awake {
   public:
    explicit Awake(Pool& pool);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    Pool* pool_;
  };

  /// The asynchronous form: start() hands the tasks to the workers and returns; finish() lets the caller take part in
  /// what is left (as worker 0), waits, and rethrows. One start per job at a time; every start needs its finish, in
  /// any order and from any thread. With one thread, and on the caller's threads, all work happens in finish(). Throws
  /// Error(internal) for a second start, or a finish without start.
  void start(Job& job, uint32_t count, Task task, void* context);
  void finish(Job& job);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Calls f(task, worker) for tasks [0, count) on `pool`, or one after the other on the calling thread where `pool` is
/// null.
template <class F>
void run_on(Pool* pool, size_t count, F&& f) {
  const auto tasks = static_cast<uint32_t>(count);
  if (pool != nullptr) return pool->run(tasks, f);
  for (uint32_t task = 0; task < tasks; ++task) f(task, 0);
}

}  // namespace keyhole::cpu
