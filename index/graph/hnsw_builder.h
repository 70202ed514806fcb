// Inserts rows into an HNSW graph (Malkov and Yashunin, arXiv 1603.09320): algorithm 1, neighbours chosen by
// algorithm 4.
#pragma once

#include "index/graph/graph.h"
#include "index/graph/lifted_keys.h"
#include "index/progress.h"

namespace keyhole::index {

struct HnswConfig {
  uint32_t m;                ///< links chosen per row; lists hold 2m on level 0, m above
  uint32_t ef_construction;  ///< beam of the search for a new row's neighbours
};

/// Returns the graph with rows [graph.nodes(), keys.rows().tokens) added one after the other on this thread, so that
/// the result depends on the arguments alone. A row's levels are drawn from its number, so that adding rows in
/// several calls gives the same graph as in one. `twins`, among the rows of `keys`, get no links. Advances the meter
/// by 1 per row.
[[nodiscard]] Graph insert_rows(const Graph& graph, const LiftedKeys& keys,
                                const HnswConfig& config, ProgressMeter& meter,
                                const Twins& twins = {});

}  // namespace keyhole::index
