// Keeps a graph searchable: local repair where rows are taken away, and links to rows that no path leads to.
#pragma once

#include "index/graph/graph.h"
#include "index/graph/lifted_keys.h"

namespace keyhole::index {

/// Drops rows >= keys.rows().tokens. A row that had links to dropped rows is linked to the surviving rows
/// behind them instead (FreshDiskANN's consolidation, arXiv 2105.09613), chosen by HNSW's occlusion rule.
/// Reads no dropped key: their memory may hold anything by now.
void remove_rows(Graph& graph, const LiftedKeys& keys);

/// Adds links until every row that is no twin can be reached from the entry along level 0: an unreachable row is
/// linked from the nearest reachable one. HNSW alone does not promise this (pruning drops the last link to a row), and
/// a row that is not reached can never be found.
void connect_all(Graph& graph, const LiftedKeys& keys, const Twins& twins = {});

/// Takes twins out of a graph in which they may be rows like others, as in files of libraries that knew no twins.
/// Links to a twin then lead to its representative, which gets the twin's links behind its own as far as there is
/// room; a twin's tower is dropped. Returns false, and leaves the graph as it is, where no link leads to or from a
/// twin.
bool take_out(const Twins& twins, Graph& graph);

}  // namespace keyhole::index
