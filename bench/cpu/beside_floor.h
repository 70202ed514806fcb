// A kernel and its floor, timed in turn.
//
// On a shared machine the speed of memory and of a core changes from second to second. Each iteration
// therefore times the floor and the kernel right after each other, and what is reported is the median over
// iterations of (time of the kernel / time of the floor): a figure that a busy neighbour moves little.
#pragma once

#include <benchmark/benchmark.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace keyhole::bench {

class BesideFloor {
 public:
  explicit BesideFloor(benchmark::State& state) : state_(state) {}

  /// Times one iteration. The order alternates, so that neither always finds the caches as the other left them.
  template <class Floor, class Kernel>
  void iterate(Floor&& floor, Kernel&& kernel) {
    double floor_seconds = 0.0;
    double kernel_seconds = 0.0;
    const bool floor_first = floor_.size() % 2 == 0;
    if (floor_first) floor_seconds = thread_seconds(floor);
    kernel_seconds = thread_seconds(kernel);
    if (!floor_first) floor_seconds = thread_seconds(floor);
    record(floor_seconds, kernel_seconds);
  }

  /// Records times of an iteration that were taken elsewhere.
  void record(double floor_seconds, double kernel_seconds) {
    floor_.push_back(floor_seconds);
    kernel_.push_back(kernel_seconds);
    state_.SetIterationTime(kernel_seconds);
  }

  template <class F>
  static double wall_seconds(F&& f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  /// Processor time of this thread: waiting for memory counts, being preempted does not.
  template <class F>
  static double thread_seconds(F&& f) {
    const double begin = thread_clock();
    f();
    benchmark::ClobberMemory();
    return thread_clock() - begin;
  }

  /// Adds the counters: GB/s of both (bytes: those read per iteration), and kernel time over floor time.
  void report(double bytes, double items) {
    std::vector<double> ratios(kernel_.size());
    for (size_t i = 0; i < ratios.size(); ++i) ratios[i] = kernel_[i] / floor_[i];
    state_.counters["x_floor"] = median(ratios);
    state_.counters["of_floor"] = 1.0 / median(ratios);
    if (bytes > 0) {
      state_.counters["GB/s"] = bytes / median(kernel_) * 1e-9;
      state_.counters["floor_GB/s"] = bytes / median(floor_) * 1e-9;
    }
    state_.counters["ns/item"] = median(kernel_) / items * 1e9;
    state_.counters["floor_ns/item"] = median(floor_) / items * 1e9;
  }

 private:
  static double thread_clock() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  }
  static double median(std::vector<double> v) {
    if (v.empty()) return 0.0;
    std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
  }

  benchmark::State& state_;
  std::vector<double> floor_, kernel_;
};

}  // namespace keyhole::bench
