// The pool's hand-off beside the least that two threads need to tell each other something.
//
//   ForkJoin/<threads>   run() of one empty task per thread. Floor: a round trip of a flag between two
//                        spinning threads. `x_floor` counts such round trips.
//   StartFinish/...      the asynchronous form
//   WakeUp/<threads>     the same after the workers have gone to sleep
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

void fork_join(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  Pool pool({.threads = threads, .spin_us = 1000});
  beside_ping_pong(state, [&] { pool.run(threads, nothing, nullptr); });
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

BENCHMARK(fork_join)->Name("ForkJoin")->Apply(thread_counts);
BENCHMARK(start_finish)->Name("StartFinish")->Apply(thread_counts);
BENCHMARK(wake_up)->Name("WakeUp")->Apply(thread_counts);

}  // namespace
}  // namespace keyhole::bench
