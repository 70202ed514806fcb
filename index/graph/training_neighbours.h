// The exact nearest keys of training queries: what a query-guided graph learns from.
#pragma once

#include <vector>

#include "index/base.h"

namespace keyhole::index {

/// The rows of largest inner product for each training query, best first.
struct Neighbours {
  uint32_t per_query = 0;
  std::vector<uint32_t> counts;  ///< `[queries]`, each <= per_query
  std::vector<uint32_t> rows;    ///< `[queries, per_query]`
  [[nodiscard]] size_t queries() const { return counts.size(); }
  [[nodiscard]] std::span<const uint32_t> of(size_t query) const {
    return {rows.data() + query * per_query, counts[query]};
  }
};

/// Chooses up to `most` of the queries, evenly spread over positions and heads, with late positions favoured (they
/// see more keys, and decoding follows them). Returns their places in `queries`, rising.
[[nodiscard]] std::vector<uint32_t> choose_queries(const TrainingQueries& queries, size_t most);

/// Finds the `per_query` nearest of the keys that each chosen query can see: those at its own position and before,
/// row 0 being at `first_position` (RetrievalAttention, section 3.2; a query that "saw" later keys would teach
/// neighbourhoods that no decoding step has), or all keys where positions are unknown. Where `rows` are given,
/// rising, only those count: without twins (twins.h) a query has `per_query` different keys. Blocks of 16 queries go
/// through the score kernel as if they were a group, so that there is no arithmetic beyond the products; the result
/// does not depend on the pool, which may be null. The context's accelerator does it instead where it takes the task.
/// Advances the meter by 1 per query.
[[nodiscard]] Neighbours nearest_keys(const Context& context, const RowsView& keys,
                                      uint32_t first_position, const TrainingQueries& queries,
                                      std::span<const uint32_t> chosen, uint32_t per_query,
                                      ProgressMeter& meter, std::span<const uint32_t> rows = {});

}  // namespace keyhole::index
