#include "runtime/step/new_tokens.h"

#include <algorithm>
#include <array>
#include <bit>

namespace keyhole::runtime {

KvView NewTokens::rows(uint32_t kv_head, uint32_t begin, uint32_t n) const {
  const size_t row_bytes = head_dim * dtype_size(dtype);
  const size_t at = (size_t{kv_head} * count + begin) * row_bytes;
  return {dense_rows(k + at, n, head_dim, dtype), dense_rows(v + at, n, head_dim, dtype)};
}

uint32_t NewTokens::seen_by_first() const {
  if (count == 0) return 0;
  return mask == nullptr ? first + 1 : static_cast<uint32_t>(std::popcount(mask[first]));
}

void NewTokens::attend_window(uint32_t kv_head, const float* q, uint32_t group,
                              StateView out) const {
  const uint32_t n = std::min(window, first + 1);
  cpu::attend_range(*kernels, rows(kv_head, first + 1 - n, n), q, group, logits, out);
}

void NewTokens::attend(uint32_t kv_head, const float* q, uint32_t group, StateView out) const {
  if (count == 0) return cpu::clear_state(out, asking * group, head_dim);
  if (mask == nullptr && window != 0) return attend_window(kv_head, q, group, out);
  if (mask != nullptr) return attend_masked(kv_head, q, group, out);
  // What all of them see at once, so that its rows are read once; then each token's share of the asking ones.
  if (first != 0) {
    cpu::attend_range(*kernels, rows(kv_head, 0, first), q, asking * group, logits, out);
  } else {
    cpu::clear_state(out, asking * group, head_dim);
  }
  std::array<float, kJointHeads * kMaxHeadDim> own_o;
  std::array<float, kJointHeads> own_lse;
  const StateView own{own_o.data(), own_lse.data()};
  for (uint32_t i = 0; i < asking; ++i) {
    for (uint32_t g = 0; g < group; g += kJointHeads) {
      const size_t head = size_t{i} * group + g;
      const uint32_t heads = std::min(kJointHeads, group - g);
      const StateView state{out.o + head * head_dim, out.lse + head};
      cpu::attend_range(*kernels, rows(kv_head, first, i + 1), q + head * head_dim, heads, logits,
                        own);
      const std::array<StateView, 2> both{state, own};
      cpu::merge_states(both, heads, head_dim, state);
    }
  }
}

void NewTokens::attend_masked(uint32_t kv_head, const float* q, uint32_t group,
                              StateView out) const {
  std::array<uint32_t, 64> ids;
  for (uint32_t i = 0; i < asking; ++i) {
    size_t n = 0;
    for (uint64_t seen = mask[first + i]; seen != 0; seen &= seen - 1) {
      ids[n++] = static_cast<uint32_t>(std::countr_zero(seen));
    }
    const size_t left_out = window != 0 && n > window ? n - window : 0;
    const size_t head = size_t{i} * group;
    cpu::attend_ids(*kernels, rows(kv_head, 0, count), {ids.data() + left_out, n - left_out},
                    q + head * head_dim, group, logits, {out.o + head * head_dim, out.lse + head});
  }
}

}  // namespace keyhole::runtime
