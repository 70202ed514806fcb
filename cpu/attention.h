// Attention states on the host: partial attention of a group, and the merge of states (FlashInfer's
// attention states: the operator is commutative and associative, the empty set is (0, -inf)).
#pragma once

#include <span>

#include "cpu/kernels.h"

namespace keyhole::cpu {

/// State of the rows [0, count) of `kv` for a group; a convenience over Kernels::attend.
/// queries `[group, dim]` fp32. Writes out.o `[group, dim]`, out.lse `[group]`.
void attend_range(const Kernels& kernels, const KvView& kv, const float* queries, uint32_t group,
                  const LogitParams& logits, StateView out);

/// State of the rows `ids` (distinct, each < count) of `kv` for a group.
void attend_ids(const Kernels& kernels, const KvView& kv, std::span<const uint32_t> ids,
                const float* queries, uint32_t group, const LogitParams& logits, StateView out);

/// Writes the state of the rows `ids` from inner products that are known already, scores[h*score_stride + i] of row
/// ids[i] (unscaled), so that only values are read. Returns false, with any state, where scores have overflowed.
[[nodiscard]] bool attend_scored(const Kernels& kernels, const RowsView& values,
                                 std::span<const uint32_t> ids, const float* scores,
                                 size_t score_stride, uint32_t group, const LogitParams& logits,
                                 StateView out);

/// out = states[0] + states[1] + ... for `heads` heads of any `dim`:
///   lse = ln sum_i e^lse_i,  o = sum_i e^(lse_i - lse) * o_i.
/// fp32, in the order given, so the bits depend only on the arguments. Heads whose states are all empty give
/// (0, -inf); never NaN. `out` may be one of the inputs. An empty list gives (0, -inf).
void merge_states(std::span<const StateView> states, uint32_t heads, uint32_t dim, StateView out);

/// Adds the state (0, sinks[h]), a learned sink, to the state of each head, in place:
///   lse' = ln(e^lse + e^sinks[h]),  o' = e^(lse - lse') * o.
/// sinks `[heads]`: finite, or -inf for none.
void add_sinks(const float* sinks, uint32_t heads, uint32_t dim, StateView state);

/// Writes the empty state (0, -inf) for all heads.
void clear_state(StateView out, uint32_t heads, uint32_t dim);

}  // namespace keyhole::cpu
