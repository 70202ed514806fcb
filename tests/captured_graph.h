// A CUDA graph of what was enqueued on a stream.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <utility>

namespace keyhole {

class CapturedGraph {
 public:
  CapturedGraph() = default;
  /// Captures what enqueue() enqueues on the stream, which outlives the graph's launches.
  template <class Enqueue>
  CapturedGraph(cudaStream_t stream, cudaStreamCaptureMode mode, Enqueue&& enqueue)
      : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
    enqueue();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  ~CapturedGraph() {
    if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  CapturedGraph(CapturedGraph&& other) noexcept { *this = std::move(other); }
  CapturedGraph& operator=(CapturedGraph&& other) noexcept {
    std::swap(stream_, other.stream_);
    std::swap(graph_, other.graph_);
    std::swap(executable_, other.executable_);
    return *this;
  }

  /// Whether there is a graph.
  explicit operator bool() const { return executable_ != nullptr; }
  [[nodiscard]] cudaGraph_t get() const { return graph_; }
  void launch() const { EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess); }
  /// launch(), and waits.
  void run() const {
    launch();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace keyhole
