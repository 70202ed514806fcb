// Steps of one sequence, or of several together, as CUDA graphs: the CUDA backend's kernels and Keyhole's, without a
// launch or an event between.
#pragma once

#include <ggml-backend-impl.h>
#include <ggml.h>

#include <cstdint>
#include <vector>

#include "tools/engines/llama.cpp/cuda/graph_cut.h"

struct ggml_cgraph;

namespace keyhole::llama_cpp {

/// Keeps graphs of the newest kinds of steps: those of one token, and of several, as drafts have them. Used by one
/// thread at a time.
class TokenGraph {
 public:
  TokenGraph() = default;
  ~TokenGraph();
  TokenGraph(const TokenGraph&) = delete;
  TokenGraph& operator=(const TokenGraph&) = delete;

  /// Enqueues a graph that was met and cut, behind what the backend has enqueued. False: nothing was done, as it is no
  /// step that can be one, or the first of its kind, or no graph can be made. Throws std::runtime_error where CUDA or
  /// the library fails.
  [[nodiscard]] bool compute(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda);

 private:
  /// What kernels are told: a step with another ggml graph that tells them the same is the same CUDA graph. llama.cpp
  /// makes its graph anew every 256 tokens.
  using Told = std::vector<uint64_t>;

  struct Kept {
    Told told;
    std::vector<uint64_t> sessions;  // LazySession::serial() of each, in the order of the rows
    std::vector<uint32_t> tokens;    // of each
    uint64_t uid = 0;                // of the ggml graph that had it last
    uint64_t used = 0;               // when, by `now_`
    uint64_t number = 0;             // Session::graph()
    void* executable = nullptr;      // a cudaGraphExec_t; NULL: it came once
    bool is_refused = false;         // no graph could be made of it: it goes piece by piece
  };

  [[nodiscard]] Kept* find(const CutGraph& found, ggml_cgraph* graph, const GraphStep& step);
  void capture(const CutGraph& found, ggml_cgraph* graph, ggml_backend_t cuda, CardCache& cache,
               Kept& kept);
  static void drop(Kept& kept);

  std::vector<Kept> kept_;
  uint64_t now_ = 0;
  /// A node that does nothing, in front of each piece: with another number in it each time the CUDA backend takes a
  /// piece for one that it has not seen, of which it makes no graph of its own.
  ggml_tensor first_{};
};

}  // namespace keyhole::llama_cpp
