// The pool keeps the state of running jobs in a fixed set of slots, so that a worker that looks at a job
// while its owner finishes and destroys it still looks at live memory.
//
// Hand-off: start() sets a slot's bit in `active`, the one word that idle workers spin on, and fills it.
// Claiming a task is a compare-and-swap on (generation, tasks left); the generation makes a claim on a slot
// that was reused in the meantime fail, and with it everything that was read from the slot before.
//
// On the caller's threads (PoolConfig::run) there are no slots and nobody waits: a job is a counter, from which each
// thread that the caller sends takes tasks until there are none. So it does not matter how many of them come, or when.
#include "cpu/pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/affinity.h"
#include "cpu/spin_pause.h"
#include "cpu/types.h"

namespace keyhole::cpu {
namespace {

constexpr uint32_t kSlots = 64;  // one bit each in a word
constexpr uint32_t kUnpublished = kSlots;
constexpr size_t kCacheLine = 64;
// Time between offers of the core to others. Where two threads share a core (a caller that has just woken, and a
// worker that spins), the one with work would otherwise wait for the other's time slice, 4 ms.
constexpr uint32_t kAwakeSpinUs = 5;

/// Spins until ready() or until `micros` have passed; returns ready().
template <class Ready>
bool spin_until(uint32_t micros, Ready&& ready) {
  if (ready()) return true;
  if (micros == 0) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(micros);
  do {
    for (int i = 0; i < 16; ++i) {  // reading the clock costs as much as a pause or two
      spin_pause();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

/// The first exception of a job; the others are dropped.
class FirstException {
 public:
  void capture() {
    if (!captured_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
  }
  /// Empties it; null if there was none. Call when no task runs any more.
  std::exception_ptr take() {
    captured_.store(false, std::memory_order_relaxed);
    return std::exchange(error_, nullptr);
  }

 private:
  std::atomic<bool> captured_{false};
  std::exception_ptr error_;
};

void rethrow(std::exception_ptr error) {
  if (error) std::rethrow_exception(std::move(error));
}

struct Claim {
  Pool::Task task;
  void* context;
  uint32_t index;
  bool last;  ///< no task of the job is left to claim
};

class alignas(kCacheLine) Slot {
 public:
  /// Precondition: the slot is free.
  void fill(uint32_t count, Pool::Task task, void* context) {
    count_.store(count, std::memory_order_relaxed);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    running_.store(1, std::memory_order_relaxed);
    undone_.store(count, std::memory_order_relaxed);
    const uint64_t generation = (left_.load(std::memory_order_relaxed) >> 32) + 1;
    left_.store(generation << 32 | count, std::memory_order_release);
  }

  bool claim(Claim& out) {
    uint64_t seen = left_.load(std::memory_order_acquire);
    for (;;) {
      const auto left = static_cast<uint32_t>(seen);
      if (left == 0) return false;
      out.task = task_.load(std::memory_order_relaxed);
      out.context = context_.load(std::memory_order_relaxed);
      out.index = count_.load(std::memory_order_relaxed) - left;
      out.last = left == 1;
      if (left_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
        return true;
      }
    }
  }

  void done() {
    if (undone_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    running_.store(0, std::memory_order_release);
    running_.notify_one();
  }

  void wait(uint32_t spin_us) {
    const auto finished = [this] { return running_.load(std::memory_order_acquire) == 0; };
    if (spin_until(spin_us, finished)) return;
    while (!finished()) running_.wait(1, std::memory_order_acquire);
  }

  /// Tasks that no worker has claimed yet.
  [[nodiscard]] uint32_t left() const {
    return static_cast<uint32_t>(left_.load(std::memory_order_relaxed));
  }

  FirstException& error() { return error_; }

 private:
  std::atomic<uint64_t> left_{0};  // generation << 32 | tasks not yet claimed
  std::atomic<uint32_t> count_{0};
  std::atomic<Pool::Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(kCacheLine) std::atomic<uint32_t> undone_{0};
  std::atomic<int> running_{
      0};  // int: the type that atomic::wait hands to the futex without a proxy
  FirstException error_;
};

/// The tasks of a job on the caller's threads.
struct LentJob {
  const void* pool;
  Pool::Task task;
  void* context;
  uint32_t count;
  std::atomic<uint32_t> next{0};
  std::atomic<uint32_t> done{0};
  FirstException error{};
};

}  // namespace

struct Pool::Impl {
  explicit Impl(const PoolConfig& c) : config(c) {}
  ~Impl() {
    stop.store(true);
    epoch.fetch_add(1);
    epoch.notify_all();
    for (std::thread& thread : workers) thread.join();
  }

  void launch();
  void work(uint32_t worker);
  void idle();
  bool help(uint32_t worker);
  void run_claim(Slot& slot, uint32_t slot_index, const Claim& claim, uint32_t worker);
  uint32_t acquire_slot();
  [[nodiscard]] uint32_t tasks_left() const;
  void wake(uint32_t wanted);
  void publish(Job& job, uint32_t slot, uint32_t wanted);
  void run_inline(uint32_t count, Task task, void* context, uint32_t worker) const;
  [[nodiscard]] bool is_lent() const { return config.run != nullptr; }
  void run_lent(uint32_t count, Task task, void* context) const;

  PoolConfig config;  // threads: the effective number
  std::array<Slot, kSlots> slots;
  alignas(kCacheLine) std::atomic<uint64_t> active{0};  // bit per slot with tasks left to claim
  std::atomic<bool> stop{false};
  alignas(kCacheLine) std::atomic<uint64_t> free_slots{~uint64_t{0}};
  alignas(kCacheLine) std::atomic<uint32_t> spinning{0};
  std::atomic<uint32_t> sleeping{0};
  std::atomic<int> epoch{0};   // what sleepers wait on
  std::atomic<int> awakes{0};  // Awake objects that exist
  std::vector<std::thread> workers;
};

namespace {

// What this thread is doing: a run() inside a task of the same pool goes inline.
thread_local const void* current_pool = nullptr;
thread_local uint32_t current_worker = 0;

class InsideTask {
 public:
  InsideTask(const void* pool, uint32_t worker)
      : pool_(std::exchange(current_pool, pool)), worker_(std::exchange(current_worker, worker)) {}
  ~InsideTask() {
    current_pool = pool_;
    current_worker = worker_;
  }
  InsideTask(const InsideTask&) = delete;
  InsideTask& operator=(const InsideTask&) = delete;

 private:
  const void* pool_;
  uint32_t worker_;
};

}  // namespace

// ---- Workers ------------------------------------------------------------------------------------------

void Pool::Impl::launch() {
  const std::vector<int> cores = allowed_cores();
  if (config.threads == 0) {
    const size_t spare = std::min<size_t>(config.spare, cores.size() - 1);
    config.threads = static_cast<uint32_t>(std::min<size_t>(cores.size() - spare, kMaxThreads));
  }
  if (config.threads > kMaxThreads) {
    throw Error(Status::invalid_argument, "pool of " + std::to_string(config.threads) +
                                              " threads: at most " + std::to_string(kMaxThreads));
  }
  if (is_lent()) return;
  workers.reserve(config.threads - 1);
  for (uint32_t worker = 1; worker < config.threads; ++worker) {
    try {
      workers.emplace_back([this, worker] { work(worker); });
    } catch (const std::system_error& e) {
      throw Error(Status::out_of_memory,
                  "cannot start thread " + std::to_string(worker) + ": " + e.what());
    }
    const int core = cores[worker % cores.size()];
    if (config.pin && !pin_to_core(workers.back(), core)) {
      throw Error(Status::unsupported, "cannot pin a thread to core " + std::to_string(core));
    }
  }
}

void Pool::Impl::work(uint32_t worker) {
  const InsideTask inside(this, worker);
  while (!stop.load(std::memory_order_relaxed)) {
    if (!help(worker)) idle();
  }
}

/// Runs tasks of all jobs that have some left; false if there was none.
bool Pool::Impl::help(uint32_t worker) {
  bool helped = false;
  uint64_t jobs = active.load(std::memory_order_acquire);
  while (jobs != 0) {
    // Workers begin at different jobs, so that several small jobs do not take turns.
    const int shift = static_cast<int>(worker % kSlots);
    const auto index =
        static_cast<uint32_t>(std::countr_zero(std::rotr(jobs, shift)) + shift) % kSlots;
    Claim claim;
    while (slots[index].claim(claim)) {
      run_claim(slots[index], index, claim, worker);
      helped = true;
    }
    jobs &= ~(uint64_t{1} << index);
  }
  return helped;
}

void Pool::Impl::run_claim(Slot& slot, uint32_t slot_index, const Claim& claim, uint32_t worker) {
  // Before the task, not after: the job cannot finish, nor its slot be reused, until this task is done.
  if (claim.last) active.fetch_and(~(uint64_t{1} << slot_index));
  try {
    claim.task(claim.context, claim.index, worker);
  } catch (...) {
    slot.error().capture();
  }
  slot.done();
}

void Pool::Impl::idle() {
  const auto has_work = [this] {
    return active.load() != 0 || stop.load(std::memory_order_relaxed);
  };
  spinning.fetch_add(1);
  bool found = spin_until(config.spin_us, has_work);
  while (!found && awakes.load(std::memory_order_relaxed) != 0) {
    std::this_thread::yield();
    found = spin_until(kAwakeSpinUs, has_work);
  }
  spinning.fetch_sub(1);
  if (found) return;
  // A starter publishes and then looks for sleepers; a sleeper registers and then looks for work. With
  // sequential consistency at least one of the two sees the other.
  sleeping.fetch_add(1);
  const int seen = epoch.load();
  if (!has_work()) epoch.wait(seen);
  sleeping.fetch_sub(1);
  const uint32_t tasks = tasks_left();
  if (tasks > 1) wake(tasks - 1);  // one is this worker's own
}

// ---- Starting and finishing ---------------------------------------------------------------------------

uint32_t Pool::Impl::acquire_slot() {
  uint64_t free = free_slots.load(std::memory_order_relaxed);
  while (free != 0) {
    const uint64_t taken = free & (free - 1);  // without its lowest bit
    if (free_slots.compare_exchange_weak(free, taken, std::memory_order_acquire,
                                         std::memory_order_relaxed)) {
      return static_cast<uint32_t>(std::countr_zero(free));
    }
  }
  return kUnpublished;
}

uint32_t Pool::Impl::tasks_left() const {
  uint32_t tasks = 0;
  for (uint64_t jobs = active.load(); jobs != 0; jobs &= jobs - 1) {
    tasks += slots[static_cast<uint32_t>(std::countr_zero(jobs))].left();
  }
  return tasks;
}

/// Sees to it that `wanted` workers are awake. Waking a thread costs its waker a system call, several
/// microseconds in a virtual machine: everyone wakes at most two, and those wake the next.
void Pool::Impl::wake(uint32_t wanted) {
  // A worker counted as spinning looks at `active` once more before it sleeps.
  const uint32_t awake = spinning.load();
  if (wanted <= awake || sleeping.load() == 0) return;
  epoch.fetch_add(1);
  epoch.notify_one();
  if (wanted - awake > 1) epoch.notify_one();
}

/// Offers the job to the workers, of which `wanted` are useful.
void Pool::Impl::publish(Job& job, uint32_t slot, uint32_t wanted) {
  // The bit first: a worker may still be looking at this slot, and claiming the last task clears the bit.
  active.fetch_or(uint64_t{1} << slot);
  slots[slot].fill(job.count_, job.task_, job.context_);
  wake(std::min(wanted, config.threads - 1));
}

void Pool::Impl::run_inline(uint32_t count, Task task, void* context, uint32_t worker) const {
  const InsideTask inside(this, worker);
  FirstException error;
  for (uint32_t i = 0; i < count; ++i) {
    try {
      task(context, i, worker);
    } catch (...) {
      error.capture();
    }
  }
  rethrow(error.take());
}

void Pool::Impl::run_lent(uint32_t count, Task task, void* context) const {
  // What fewer threads than two do, and what a task does inside another one, is this thread's.
  if (current_pool == this) return run_inline(count, task, context, current_worker);
  if (count <= 1 || config.threads == 1) return run_inline(count, task, context, 0);
  LentJob job{this, task, context, count};
  const auto take = [](void* of, uint32_t worker) {
    LentJob& lent = *static_cast<LentJob*>(of);
    const InsideTask inside(lent.pool, worker);
    for (;;) {
      const uint32_t i = lent.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= lent.count) return;
      try {
        lent.task(lent.context, i, worker);
      } catch (...) {
        lent.error.capture();
      }
      lent.done.fetch_add(1, std::memory_order_acq_rel);
    }
  };
  config.run(config.run_user, take, &job, std::min(count, config.threads));
  // Nothing is left unless the caller's function has left calls out. The counter makes what tasks wrote visible here,
  // whatever the caller's threads did to tell each other.
  take(&job, 0);
  while (job.done.load(std::memory_order_acquire) != count) std::this_thread::yield();
  rethrow(job.error.take());
}

Pool::Pool(const PoolConfig& config) : impl_(std::make_unique<Impl>(config)) { impl_->launch(); }

Pool::~Pool() = default;

Pool::Inline::Inline(const Pool& pool)
    : outer_pool_(std::exchange(current_pool, pool.impl_.get())),
      outer_worker_(std::exchange(current_worker, 0)) {}

Pool::Inline::~Inline() {
  current_pool = outer_pool_;
  current_worker = outer_worker_;
}

Pool::Awake::Awake(Pool& pool) : pool_(&pool) {
  Impl& impl = *pool.impl_;
  impl.awakes.fetch_add(1);
  if (impl.sleeping.load() == 0) return;
  impl.epoch.fetch_add(1);
  impl.epoch.notify_all();
}

Pool::Awake::~Awake() { pool_->impl_->awakes.fetch_sub(1); }

uint32_t Pool::threads() const { return impl_->config.threads; }

void Pool::run(uint32_t count, Task task, void* context) {
  if (impl_->is_lent()) return impl_->run_lent(count, task, context);
  if (current_pool == impl_.get()) return impl_->run_inline(count, task, context, current_worker);
  if (count <= 1 || threads() == 1) return impl_->run_inline(count, task, context, 0);
  Job job;
  start(job, count, task, context);
  finish(job);
}

void Pool::start(Job& job, uint32_t count, Task task, void* context) {
  if (job.pool_ != nullptr) throw Error(Status::internal, "job was started twice");
  job.pool_ = this;
  job.count_ = count;
  job.task_ = task;
  job.context_ = context;
  const bool has_workers = threads() > 1 && !impl_->is_lent();
  job.slot_ = count > 0 && has_workers ? impl_->acquire_slot() : kUnpublished;
  if (job.slot_ != kUnpublished) impl_->publish(job, job.slot_, count);
}

void Pool::finish(Job& job) {
  if (job.pool_ != this) throw Error(Status::internal, "job was not started in this pool");
  job.pool_ = nullptr;
  if (impl_->is_lent()) return impl_->run_lent(job.count_, job.task_, job.context_);
  // More jobs than slots: this one is the caller's alone.
  if (job.slot_ == kUnpublished) return impl_->run_inline(job.count_, job.task_, job.context_, 0);

  Slot& slot = impl_->slots[job.slot_];
  {
    const InsideTask inside(impl_.get(), 0);
    Claim claim;
    while (slot.claim(claim)) impl_->run_claim(slot, job.slot_, claim, 0);
  }
  slot.wait(impl_->config.spin_us);
  std::exception_ptr error = slot.error().take();
  impl_->free_slots.fetch_or(uint64_t{1} << job.slot_, std::memory_order_release);
  rethrow(std::move(error));
}

Job::~Job() {
  if (pool_ == nullptr) return;
  try {
    pool_->finish(*this);
  } catch (...) {  // a job is destroyed while it runs only when another exception is under way
  }
}

}  // namespace keyhole::cpu
