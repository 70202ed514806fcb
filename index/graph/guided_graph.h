// The query-guided graph: edges between keys that queries want together (RoarGraph, PVLDB 17(11), section 4,
// as RetrievalAttention uses it), chosen in the lifted geometry.
//
// PROJECT. Every training query makes one of its nearest keys, the pivot, a neighbour of the others. Attention
// has few favourites (623 pivots for 16k queries), so a pivot is spread: the first of a query's 20 best keys
// whose list is not full. CONNECT. Every key then gets further edges to what a beam search finds near it, so
// that it can be reached, and so that keys that no training query wanted are in the graph
// too. BRIDGE. Nearest keys of a training query that are not linked to each other are (bridges.h): for the same
// recall a walk expands a fifth fewer rows. REPAIR. What is still not reachable is linked from its nearest
// reachable key.
//
// All steps run in rounds: lists are computed from the graph as it was when the round began, then taken over
// in a fixed order. The result does not depend on the number of threads.
#pragma once

#include <vector>

#include "index/graph/graph.h"
#include "index/graph/lifted_keys.h"
#include "index/graph/training_neighbours.h"

namespace keyhole::index {

struct GuidedConfig {
  uint32_t m;     ///< links that each of the three steps may add to a key
  uint32_t beam;  ///< of the searches that connect
  [[nodiscard]] uint32_t width() const { return 3 * m; }  ///< of the lists
};

/// How the training queries met the keys.
struct Guidance {
  size_t queries = 0;
  size_t pivots = 0;              ///< distinct
  size_t hit = 0;                 ///< different keys that are neighbours of at least one query
  std::vector<uint32_t> entries;  ///< keys where searches start: the most wanted ones
};

struct GuidedGraph {
  Graph graph;
  Guidance guidance;
};

/// Builds the graph of all keys, with memory reserved for as many more. `twins`, among these keys, get no links;
/// `neighbours` must hold none of them. Advances the meter by guided_work().
[[nodiscard]] GuidedGraph build_guided(const Context& context, const LiftedKeys& keys,
                                       const Neighbours& neighbours, const GuidedConfig& config,
                                       ProgressMeter& meter, const Twins& twins = {});
[[nodiscard]] inline double guided_work(size_t rows, size_t queries) {
  return static_cast<double>(rows) + static_cast<double>(queries);
}

/// New lists of some rows, prepared beside a graph.
struct GraphEdits {
  size_t nodes = 0;             ///< of the graph with these edits
  std::vector<uint32_t> rows;   ///< rising
  std::vector<uint32_t> slots;  ///< `[rows.size(), width]`
};

/// Prepares the edits that connect rows [graph.nodes(), keys.rows().tokens) to the graph as CONNECT does; `twins`,
/// among the rows of `keys`, get no links. Reads only; runs on the calling thread. Advances the meter by 1 per row.
[[nodiscard]] GraphEdits connect_rows(const Graph& graph, const LiftedKeys& keys,
                                      std::span<const uint32_t> entries, const GuidedConfig& config,
                                      ProgressMeter& meter, const Twins& twins = {});
void apply(const GraphEdits& edits, Graph& graph);

}  // namespace keyhole::index
