// A CUDA graph: recorded work of a stream that is launched at once, again and again.
#pragma once

#include <utility>

#include "tools/llama/cuda/memory.h"

namespace keyhole::tools::cuda {

class Graph {
 public:
  Graph() = default;
  ~Graph() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Records what enqueue() puts on `stream`, in place of the former recording; none of it happens now. Rethrows what
  /// enqueue() throws; the graph is then unchanged.
  template <class Enqueue>
  void capture(cudaStream_t stream, const Enqueue& enqueue) {
    // Captures this thread alone, because others, such as the session's, may call CUDA meanwhile.
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "a graph");
    cudaGraph_t graph = nullptr;
    try {
      enqueue();
    } catch (...) {
      (void)cudaStreamEndCapture(stream, &graph);
      (void)cudaGetLastError();
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "a graph");
    const cudaError_t error = install(graph);
    (void)cudaGraphDestroy(graph);
    check(error, "a graph");
  }

  void launch(cudaStream_t stream) const { check(cudaGraphLaunch(exec_, stream), "a graph"); }

 private:
  /// Updates the graph where possible: the same kernels with other arguments cost a tenth of a new graph.
  cudaError_t install(cudaGraph_t graph) {
    cudaGraphExecUpdateResultInfo info{};
    if (exec_ != nullptr) {
      if (cudaGraphExecUpdate(exec_, graph, &info) == cudaSuccess) return cudaSuccess;
      (void)cudaGetLastError();
    }
    cudaGraphExec_t fresh = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&fresh, graph, 0);
    if (error != cudaSuccess) return error;
    if (cudaGraphExec_t former = std::exchange(exec_, fresh); former != nullptr) {
      (void)cudaGraphExecDestroy(former);
    }
    return cudaSuccess;
  }

  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace keyhole::tools::cuda
