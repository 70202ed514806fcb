// `hnsw`: a navigable small-world graph over the keys alone (HNSW). The baseline among graphs: it knows
// nothing of queries, which lie far from keys, and shows what that costs.
//
// Edges are chosen in the lifted geometry (lifted_keys.h); searches go by the raw inner product, each head of a group
// on its own. `geometry=ip` chooses edges by raw inner product as most libraries do, and leaves the graph as it is
// built, to show the collapse. Keys are read where the caller keeps them; the index holds only links and the list of
// equal keys, of which the first alone is in the graph (twins.h).
//
// A search walks down the upper levels greedily and then runs the beam on level 0 from where it came out
// and from the entry row; in a lifted graph every row can be reached from the entry row (graph_repair.h),
// so a beam as wide as the index finds everything. A search for more than a 32nd of the rows scans them all.
#pragma once

#include "index/index.h"
#include "index/spec.h"

namespace keyhole::index {

extern const TypeDecl kHnswType;
[[nodiscard]] std::unique_ptr<Index> make_hnsw(const Spec& spec, uint32_t dim, DType dtype,
                                               const Context& context);
[[nodiscard]] size_t estimate_hnsw(const Spec& spec, size_t count, uint32_t dim, DType dtype);

}  // namespace keyhole::index
