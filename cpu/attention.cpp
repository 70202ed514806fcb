// Partial attention over views, and the merge of states.
//
// The merge is compiled without contraction to FMA and sums in the order given, so that its bits depend on
// nothing but its arguments.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>

#include "cpu/attention_state.h"

namespace keyhole::cpu {
namespace {

// Number of columns that a merge adds up at once: enough for every head with which the library itself attends.
constexpr uint32_t kMergedColumns = kMaxHeadDim;

void attend(const Kernels& kernels, const KvView& kv, const uint32_t* ids, size_t count,
            const float* queries, uint32_t group, const LogitParams& logits, StateView out) {
  const AttendArgs args = {.queries = queries,
                           .group = group,
                           .keys = kv.keys,
                           .values = kv.values,
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
  attend(kernels, kv, nullptr, kv.keys.tokens, queries, group, logits, out);
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
                                                            .values = values,
                                                            .ids = ids.data(),
                                                            .count = ids.size(),
                                                            .logits = logits,
                                                            .o = out.o,
                                                            .lse = out.lse});
  return std::all_of(out.lse, out.lse + group, [](float lse) { return std::isfinite(lse); });
}

void merge_states(std::span<const StateView> states, uint32_t heads, uint32_t dim, StateView out) {
  for (uint32_t h = 0; h < heads; ++h) {
    LogSum<float> lse;
    for (const StateView& s : states) lse.cover(s.lse[h]);
    for (const StateView& s : states) lse.add(s.lse[h]);
    // Columns are merged in blocks, so that any dim will do. All inputs of a block are read before it is written, and
    // all blocks are written before out.lse is, because out may be one of the inputs.
    const size_t row = static_cast<size_t>(h) * dim;
    for (uint32_t begin = 0; begin < dim; begin += kMergedColumns) {
      const uint32_t n = std::min(kMergedColumns, dim - begin);
      float merged[kMergedColumns];
      std::fill_n(merged, n, 0.0F);
      for (const StateView& s : states) {
        if (s.lse[h] == kMinusInf)
          continue;  // an empty set adds nothing, even if its o is not zero
        // Weights are normalised before they are applied: they sum to 1, so o cannot overflow.
        const float weight = lse.share(s.lse[h]);
        const float* o = s.o + row + begin;
        for (uint32_t j = 0; j < n; ++j) merged[j] += weight * o[j];
      }
      std::copy_n(merged, n, out.o + row + begin);
    }
    out.lse[h] = lse.value();
  }
}

void add_sinks(const float* sinks, uint32_t heads, uint32_t dim, StateView state) {
  for (uint32_t h = 0; h < heads; ++h) {
    if (sinks[h] == kMinusInf) continue;
    const double lse = add_logs<double>(state.lse[h], sinks[h]);
    const auto weight = static_cast<float>(std::exp(state.lse[h] - lse));
    float* o = state.o + size_t{h} * dim;
    // An empty set's o need not be 0.
    for (uint32_t j = 0; j < dim; ++j) o[j] = weight > 0.0F ? weight * o[j] : 0.0F;
    state.lse[h] = static_cast<float>(lse);
  }
}

void clear_state(StateView out, uint32_t heads, uint32_t dim) {
  std::fill_n(out.o, static_cast<size_t>(heads) * dim, 0.0F);
  std::fill_n(out.lse, heads, kMinusInf);
}

}  // namespace keyhole::cpu
