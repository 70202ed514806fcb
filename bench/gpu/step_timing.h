// What benchmarks of steps on a stream share: graphs, their times, and a host that answers at once.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "gpu/cuda/common/memory.h"
#include "gpu/device.h"

namespace keyhole::gpu {

/// Captures what `enqueue` puts on the stream as a graph, which the caller destroys.
template <class F>
cudaGraphExec_t captured(cudaStream_t stream, F&& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&ready, graph, 0), "graph");
  check(cudaGraphDestroy(graph), "graph");
  return ready;
}

/// Number of first runs that do not count.
inline constexpr int kWarmUpRuns = 3;

/// The median microseconds of what is enqueued, after kWarmUpRuns.
template <class F>
double median_us(cudaStream_t stream, int repetitions, F&& enqueue) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < repetitions + kWarmUpRuns; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    enqueue();
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "run");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (i >= kWarmUpRuns) times.push_back(ms * 1000);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  return times[times.size() / 2];
}

/// The median microseconds of a graph's runs.
inline double median_us(cudaStream_t stream, cudaGraphExec_t graph, int repetitions) {
  return median_us(stream, repetitions, [&] { check(cudaGraphLaunch(graph, stream), "launch"); });
}

/// A host that delivers empty states as soon as a step arrives, on a thread of its own.
class Answerer {
 public:
  Answerer(StreamSteps& steps, const ResidentShape& shape) : steps_(steps), shape_(shape) {
    const uint32_t group = shape.q_heads / shape.kv_heads;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint32_t h = 0; h < shape.kv_heads; ++h) {
        const StateView slot = steps.host_slot(layer, h);
        std::fill_n(slot.o, group * shape.head_dim, 0.0F);
        std::fill_n(slot.lse, group, kMinusInf);
      }
    }
    thread_ = std::thread([this] { serve(); });
  }
  ~Answerer() {
    stop_ = true;
    thread_.join();
  }
  Answerer(const Answerer&) = delete;
  Answerer& operator=(const Answerer&) = delete;

 private:
  void serve() {
    for (uint32_t sequence = 1;; ++sequence) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        Published published;
        if (!steps_.await(layer, sequence, 60'000'000, 60'000'000, stop_, published)) return;
        for (uint32_t h = 0; h < shape_.kv_heads; ++h) steps_.deliver(layer, h, sequence);
      }
    }
  }

  StreamSteps& steps_;
  ResidentShape shape_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace keyhole::gpu
