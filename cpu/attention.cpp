// Partial attention over views, and the merge of states.
//
// The merge is compiled without contraction to FMA and sums in the order given, so that its bits depend on
// nothing but its arguments.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>

namespace keyhole::cpu {
namespace {

void attend(const Kernels& kernels, const KvView& kv, const uint32_t* ids, size_t count,
            const float* queries, uint32_t group, const LogitParams& logits, StateView out) {
  const AttendArgs args = {.queries = queries,
                           .group = group,
                           .dim = kv.keys.dim,
                           .keys = kv.keys.data,
                           .key_stride = kv.keys.stride,
                           .values = kv.values.data,
                           .value_stride = kv.values.stride,
                           .ids = ids,
                           .count = count,
                           .logits = logits,
                           .o = out.o,
                           .lse = out.lse};
  kernels.attend[static_cast<size_t>(kv.keys.dtype)](args);
}

}  // namespace

void attend_range(const Kernels& kernels, const KvView& kv, const float* queries, uint32_t group,
                  const LogitParams& logits, StateView out) {
  attend(kernels, kv, nullptr, kv.keys.count, queries, group, logits, out);
}

void attend_ids(const Kernels& kernels, const KvView& kv, std::span<const uint32_t> ids,
                const float* queries, uint32_t group, const LogitParams& logits, StateView out) {
  if (ids.empty()) {  // a null id list would mean "all rows"
    clear_state(out, group, kv.keys.dim);
    return;
  }
  attend(kernels, kv, ids.data(), ids.size(), queries, group, logits, out);
}

bool attend_scored(const Kernels& kernels, const RowsView& values, std::span<const uint32_t> ids,
                   const float* scores, size_t score_stride, uint32_t group,
                   const LogitParams& logits, StateView out) {
  if (ids.empty()) {
    clear_state(out, group, values.dim);
    return true;
  }
  kernels.attend_scored[static_cast<size_t>(values.dtype)]({.scores = scores,
                                                            .score_stride = score_stride,
                                                            .group = group,
                                                            .dim = values.dim,
                                                            .values = values.data,
                                                            .value_stride = values.stride,
                                                            .ids = ids.data(),
                                                            .count = ids.size(),
                                                            .logits = logits,
                                                            .o = out.o,
                                                            .lse = out.lse});
  return std::all_of(out.lse, out.lse + group, [](float lse) { return std::isfinite(lse); });
}

void merge_states(std::span<const StateView> states, uint32_t heads, uint32_t dim, StateView out) {
  for (uint32_t h = 0; h < heads; ++h) {
    float largest = kMinusInf;
    for (const StateView& s : states) largest = std::max(largest, s.lse[h]);
    float merged[kMaxHeadDim] = {};
    float total = 0.0F;
    if (largest != kMinusInf) {  // else every set is empty, and -inf - -inf would be NaN
      for (const StateView& s : states) total += std::exp(s.lse[h] - largest);
      for (const StateView& s : states) {
        if (s.lse[h] == kMinusInf) continue;  // o of an empty set adds nothing, whatever it holds
        // Weights are normalised before they are applied: they sum to 1, so o cannot overflow.
        const float weight = std::exp(s.lse[h] - largest) / total;
        const float* o = s.o + static_cast<size_t>(h) * dim;
        for (uint32_t j = 0; j < dim; ++j) merged[j] += weight * o[j];
      }
    }
    // All inputs of this head have been read: out may be one of them.
    std::copy_n(merged, dim, out.o + static_cast<size_t>(h) * dim);
    out.lse[h] = largest == kMinusInf ? kMinusInf : largest + std::log(total);
  }
}

void clear_state(StateView out, uint32_t heads, uint32_t dim) {
  std::fill_n(out.o, static_cast<size_t>(heads) * dim, 0.0F);
  std::fill_n(out.lse, heads, kMinusInf);
}

}  // namespace keyhole::cpu
