// Graphs cut at the nodes that Keyhole computes: what lies between goes to the CUDA backend in pieces.
#pragma once

#include <ggml-backend-impl.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "tools/engines/llama.cpp/cuda/card_cache.h"
#include "tools/engines/llama.cpp/nodes.h"

struct ggml_cgraph;
struct ggml_tensor;

namespace keyhole::llama_cpp {

/// A node that has to do with a cache on the card.
struct Mark {
  enum class Kind { kWrite, kAttend, kRead, kChange };
  int node = 0;
  Kind kind = Kind::kRead;
  CardCache* cache = nullptr;
  CacheName name;
  /// Of kRead and kChange: the tensor of the cache, or the view of it, that is read or changed.
  const ggml_tensor* touched = nullptr;
};

/// Nodes for the CUDA backend, then one that Keyhole attends; the last piece has none.
struct Piece {
  std::vector<ggml_tensor*> nodes;
  /// As ggml_cgraph::uid: the CUDA backend knows by it that it has seen the piece before.
  uint64_t uid = 0;
  const Mark* attention = nullptr;
};

/// What is known of one graph.
struct CutGraph {
  std::vector<Mark> marks;
  /// What was decided about each mark when `pieces` were made.
  std::vector<Way> ways;
  std::vector<Piece> pieces;
  /// Whether all that the nodes read and write has its memory (graph_memory.h).
  bool is_held = false;
  /// Masks that nodes read: all of the graph, and those of `pieces`.
  std::vector<const ggml_tensor*> masks, masks_of_pieces;
};

/// Marks and pieces of graphs that come again: llama.cpp computes the same graph step after step.
class GraphCuts {
 public:
  /// The graph's marks, found once for each uid (0: each time).
  [[nodiscard]] CutGraph& find(ggml_cgraph* graph);
  /// The caches have met the graph. True: `pieces` is what has to be computed; false: the graph as it is.
  [[nodiscard]] static bool cut(CutGraph& found, ggml_cgraph* graph);

 private:
  std::unordered_map<uint64_t, CutGraph> known_;
};

/// Computes a piece's nodes. `graph` is the one that was cut.
[[nodiscard]] ggml_status compute(ggml_backend_t cuda, ggml_cgraph* graph, Piece& piece);

/// New K and V of a cache must stay where they are until attention: tells ggml's allocator so.
void keep_new_rows(ggml_cgraph* graph, ggml_backend_graph_optimize_params* params);

}  // namespace keyhole::llama_cpp
