// How far rows of lists that a step has not read may reach: whether one of them may weigh so much that the step looks
// at all codes again.
#pragma once

#include "gpu/cuda/codes/doubt.cuh"

namespace keyhole::gpu::codes {

/// The largest logit that a row of an unread list may have for a head, base 2, before a soft-cap; by a warp; -inf
/// without lists. by_table: reads_by_table().
__device__ inline float reach_of_lists(const CodesParams& s, uint32_t kv_head, bool by_table,
                                       uint32_t h) {
  if (!by_table || h >= s.group) return kMinusInf;
  const uint32_t lane = threadIdx.x % 32;
  const ChosenLists& ends = s.list_ends[kv_head];
  return warp_max(lane < s.lists.blocks ? __ldcg(&ends.reach[lane][h]) : kMinusInf);
}

/// Whether a list that was not read may hold a row that matters for a head, as ListChoice::may_widen() asks it. lse:
/// base 2. A second look is then at all codes. reach: reach_of_lists().
__device__ inline bool may_hide(const CodesParams& s, uint32_t kv_head, float reach, float lse) {
  const ChosenLists& ends = s.list_ends[kv_head];
  const float cap = s.logits.softcap * kLog2E;
  // Behind a soft-cap the weight of lists by second order may be more than any row has.
  if (cap > 0.0F) lse = fminf(lse, cap);
  if (reach > uncapped_logit(lse - kHiddenLight * kLog2E, cap)) return true;
  return __ldcg(&ends.is_wide) != 0 && reach > doubt_bound(s, lse);
}

}  // namespace keyhole::gpu::codes
