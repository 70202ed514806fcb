// The pool's hand-off beside the least that two threads need to tell each other something.
//
//   ForkJoin/<threads>   run() of one empty task per thread. Floor: a round trip of a flag between two
//                        spinning threads. `x_floor` counts such round trips.
//   Meet/<threads>       the same with tasks that wait until all run
//   StartFinish/...      the asynchronous form of ForkJoin
//   WakeUp/<threads>     the same after the workers have gone to sleep
//   Build/<threads>      64 tasks of 0.1 to 3 ms, each with a run() of 16 parts inside, as heads of an index are
//                        built. Floor: the same work on one thread, divided by the threads.
//   Build1/<threads>     one such task at a time: only what it runs inside is spread
//
// ForkJoin, Meet, Build and Build1 also run on oneTBB's task_arena and on OpenMP, where the machine has them.
#ifdef KEYHOLE_BENCH_TBB
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#endif
#ifdef KEYHOLE_BENCH_OPENMP
#include <omp.h>
#endif

#include <atomic>
#include <thread>

#include "bench/cpu/beside_floor.h"
#include "cpu/pool.h"

namespace keyhole::bench {
namespace {

using namespace keyhole::cpu;

/// A second thread that answers every ping.
class PingPong {
 public:
  PingPong() : thread_([this] { answer(); }) {}
  ~PingPong() {
    ping_.store(-1);
    thread_.join();
  }
  PingPong(const PingPong&) = delete;
  PingPong& operator=(const PingPong&) = delete;

  void round_trip() {
    ping_.store(++round_, std::memory_order_release);
    while (pong_.load(std::memory_order_acquire) != round_) spin();
  }

 private:
  static void spin() {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }
  void answer() {
    for (int seen = 0;;) {
      const int ping = ping_.load(std::memory_order_acquire);
      if (ping < 0) return;
      if (ping == seen) {
        spin();
        continue;
      }
      seen = ping;
      pong_.store(ping, std::memory_order_release);
    }
  }

  int round_ = 0;
  alignas(64) std::atomic<int> ping_{0};
  alignas(64) std::atomic<int> pong_{0};
  std::thread thread_;
};

constexpr int kRounds = 20;

/// Seconds of kRounds round trips. The second thread lives only here: later it would take a worker's core.
double ping_pong() {
  PingPong ping;
  ping.round_trip();
  return BesideFloor::wall_seconds([&] {
    for (int i = 0; i < kRounds; ++i) ping.round_trip();
  });
}

template <class HandOff>
void beside_ping_pong(benchmark::State& state, HandOff&& hand_off) {
  BesideFloor beside(state);
  for (auto _ : state) {
    const double floor = ping_pong();
    hand_off();  // wakes the workers
    const double kernel = BesideFloor::wall_seconds([&] {
      for (int i = 0; i < kRounds; ++i) hand_off();
    });
    beside.record(floor, kernel);
  }
  beside.report(0.0, kRounds);
}

void nothing(void*, uint32_t, uint32_t) {}

// ---- Three pools behind one interface: run(count, f), f(task) ---------------------------------------------

class OurPool {
 public:
  explicit OurPool(uint32_t threads) : pool_({.threads = threads, .spin_us = 1000}) {}
  template <class F>
  void run(uint32_t count, const F& f) {
    pool_.run(count, [&](uint32_t task, uint32_t) { f(task); });
  }

 private:
  Pool pool_;
};

#ifdef KEYHOLE_BENCH_TBB
class TbbPool {
 public:
  explicit TbbPool(uint32_t threads) : arena_(static_cast<int>(threads)) {}
  template <class F>
  void run(uint32_t count, const F& f) {
    arena_.execute([&] {
      // One task each, as the other pools do: fine tasks are what uneven work needs.
      oneapi::tbb::parallel_for(
          oneapi::tbb::blocked_range<uint32_t>(0, count, 1),
          [&](const auto& range) {
            for (uint32_t i = range.begin(); i < range.end(); ++i) f(i);
          },
          oneapi::tbb::simple_partitioner());
    });
  }

 private:
  oneapi::tbb::task_arena arena_;
};
#endif

#ifdef KEYHOLE_BENCH_OPENMP
class OpenMpPool {
 public:
  explicit OpenMpPool(uint32_t threads) : threads_(static_cast<int>(threads)) {
    omp_set_max_active_levels(1);  // a region inside a task is run by its thread alone, as in ours
  }
  template <class F>
  void run(uint32_t count, const F& f) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (uint32_t i = 0; i < count; ++i) f(i);
  }

 private:
  int threads_;
};
#endif

template <class AnyPool>
void fork_join(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  AnyPool pool(threads);
  beside_ping_pong(state, [&] { pool.run(threads, [](uint32_t) {}); });
}

/// Tasks that wait for each other: a pool whose caller does both alone, as oneTBB's often does with empty ones,
/// hands nothing over.
template <class AnyPool>
void meet(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  AnyPool pool(threads);
  std::atomic<uint32_t> arrived{0};
  beside_ping_pong(state, [&] {
    arrived.store(0);
    pool.run(threads, [&](uint32_t) {
      arrived.fetch_add(1);
      while (arrived.load() < threads) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
      }
    });
  });
}

/// About `us` microseconds of arithmetic.
void work(double us) {
  float x = 0.5F;
  for (int i = 0; i < static_cast<int>(us * 300); ++i) x = x * 0.999F + 1e-3F;
  benchmark::DoNotOptimize(x);
}

constexpr uint32_t kHeads = 64;
constexpr uint32_t kParts = 16;
double part_us(uint32_t head) {
  return (0.1 + 2.9 * (head * 37 % kHeads) / kHeads) * 1000 / kParts;
}

template <class AnyPool, bool nested_only>
void build(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  AnyPool pool(threads);
  BesideFloor beside(state);
  const auto head = [&](uint32_t h) { pool.run(kParts, [&](uint32_t) { work(part_us(h)); }); };
  for (auto _ : state) {
    const double floor = BesideFloor::wall_seconds([&] {
      for (uint32_t h = 0; h < kHeads; ++h) {
        for (uint32_t p = 0; p < kParts; ++p) work(part_us(h));
      }
    });
    const double kernel = BesideFloor::wall_seconds([&] {
      if constexpr (nested_only) {
        for (uint32_t h = 0; h < kHeads; ++h) head(h);
      } else {
        pool.run(kHeads, head);
      }
    });
    beside.record(floor / threads, kernel);
  }
  beside.report(0.0, kHeads);
}

void start_finish(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  Pool pool({.threads = threads, .spin_us = 1000});
  Job job;
  beside_ping_pong(state, [&] {
    pool.start(job, threads, nothing, nullptr);
    pool.finish(job);
  });
}

// Every task waits for all others, so that no round ends before every worker has woken.
void wake_up(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  Pool pool({.threads = threads, .spin_us = 0});
  BesideFloor beside(state);
  for (auto _ : state) {
    const double floor = ping_pong() / kRounds;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::atomic<uint32_t> arrived{0};
    const double kernel = BesideFloor::wall_seconds([&] {
      pool.run(threads, [&](uint32_t, uint32_t) {
        arrived.fetch_add(1);
        while (arrived.load() < threads) std::this_thread::yield();
      });
    });
    beside.record(floor, kernel);
  }
  beside.report(0.0, 1);
}

void thread_counts(benchmark::internal::Benchmark* b) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  for (int threads = 2; threads < cores; threads *= 2) b->Arg(threads);
  b->Arg(std::max(cores, 2))->UseManualTime()->Unit(benchmark::kMicrosecond);
}

#define KEYHOLE_POOL_BENCHES(AnyPool, suffix)                                   \
  BENCHMARK(fork_join<AnyPool>)->Name("ForkJoin" suffix)->Apply(thread_counts); \
  BENCHMARK(meet<AnyPool>)->Name("Meet" suffix)->Apply(thread_counts);          \
  BENCHMARK(build<AnyPool, false>)->Name("Build" suffix)->Apply(thread_counts); \
  BENCHMARK(build<AnyPool, true>)->Name("Build1" suffix)->Apply(thread_counts);
KEYHOLE_POOL_BENCHES(OurPool, "")
#ifdef KEYHOLE_BENCH_TBB
KEYHOLE_POOL_BENCHES(TbbPool, "/tbb")
#endif
#ifdef KEYHOLE_BENCH_OPENMP
KEYHOLE_POOL_BENCHES(OpenMpPool, "/openmp")
#endif
BENCHMARK(start_finish)->Name("StartFinish")->Apply(thread_counts);
BENCHMARK(wake_up)->Name("WakeUp")->Apply(thread_counts);

}  // namespace
}  // namespace keyhole::bench
