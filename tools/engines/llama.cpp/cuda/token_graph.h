// A step of one sequence as one CUDA graph: the CUDA backend's kernels and Keyhole's, without a launch or an event between.
#pragma once

#include <ggml-backend-impl.h>
#include <ggml.h>

#include <cstdint>

#include "tools/engines/llama.cpp/cuda/graph_cut.h"

struct ggml_cgraph;

namespace keyhole::llama_cpp {

/// Keeps one graph: that of the steps that come now. Used by one thread at a time.
class TokenGraph {
 public:
  TokenGraph() = default;
  ~TokenGraph();
  TokenGraph(const TokenGraph&) = delete;
  TokenGraph& operator=(const TokenGraph&) = delete;

  /// Enqueues a graph that was met and cut, behind what the backend has enqueued. False: nothing was done, as it is no
  /// step that can be one, or the first of its kind, or no graph can be made. Throws std::runtime_error where CUDA or the library fails.
  [[nodiscard]] bool compute(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda);

 private:
  void capture(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda, CardCache& cache);
  void drop();

  uint64_t uid_ = 0;      // of the ggml graph
  uint64_t session_ = 0;  // LazySession::serial()
  bool seen_ = false;
  bool is_refused_ = false;
  void* executable_ = nullptr;  // a cudaGraphExec_t
  /// A node that does nothing, in front of each piece: with another number in it each time the CUDA backend takes a piece
  /// for one that it has not seen, of which it makes no graph of its own.
  ggml_tensor first_{};
};

}  // namespace keyhole::llama_cpp
