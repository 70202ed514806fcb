// The end of a second look at codes: a head's state, made from those that the splits have left, replaces the state
// that the step has written, unless no more rows were found than the step had read.
#pragma once

#include "gpu/cuda/codes/merge_head.cuh"
#include "gpu/cuda/codes/settle_find.cuh"

namespace keyhole::gpu::codes {

template <int kDim>
struct MergeShared {
  alignas(16) float4 sums[kAttendWarps<kDim> * 32];
  alignas(16) float row[kDim];
  float weights[kMostSplits];
  float top, total;
};

/// Sums a head's quad `quad` over the splits, by threads quad, quad + columns, .. of the block, which take splits in
/// turn; the sum is in thread `quad` of the first `columns` afterwards. By the whole block, between barriers.
template <int kDim>
__device__ inline float4 sum_of_splits(const float4* parts, size_t stride, uint32_t splits,
                                       MergeShared<kDim>& shared) {
  constexpr uint32_t kThreads = kAttendWarps<kDim> * 32, kQuads = kDim / 4;
  constexpr uint32_t kColumns = kQuads <= 16 ? 16 : kQuads <= 32 ? 32 : kQuads <= 64 ? 64 : 128;
  static_assert(kQuads <= kColumns && kColumns <= kThreads);
  constexpr uint32_t kRows = kThreads / kColumns, kAhead = 8;
  const uint32_t quad = threadIdx.x % kColumns;
  float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
  if (quad < kQuads) {
#pragma unroll 1
    for (uint32_t first = threadIdx.x / kColumns; first < splits; first += kRows * kAhead) {
      float4 x[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t split = first + i * kRows;
        x[i] = split < splits ? __ldcg(&parts[split * stride + quad])
                              : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t split = first + i * kRows;
        const float w = split < splits ? shared.weights[split] : 0.0F;
        sum.x = fmaf(w, x[i].x, sum.x), sum.y = fmaf(w, x[i].y, sum.y);
        sum.z = fmaf(w, x[i].z, sum.z), sum.w = fmaf(w, x[i].w, sum.w);
      }
    }
  }
  shared.sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < kColumns) {
    for (uint32_t i = threadIdx.x + kColumns; i < kThreads; i += kColumns) {
      const float4 x = shared.sums[i];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  return sum;
}

/// Merges head h of the KV head's group, by the whole thread block. Returns true in its first thread if the part
/// needs another pass and none of its heads has said so before.
template <int kDim>
__device__ inline bool merge_again(const CodesParams& s, const DoubtUnit& unit, uint32_t h,
                                   MergeShared<kDim>& shared) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  DoubtRecord& record = s.doubt.records[unit.kv_head];
  const bool found_none = __ldcg(&record.found[unit.part][unit.pass]) == 0;
  const bool is_rounded = (__ldcg(&record.reasons) & DoubtRecord::kRounded) != 0;
  if (unit.pass == 0 && found_none && !is_rounded) return false;
  const size_t first = unit.slot(0) * s.group + h;
  const uint32_t states = unit.splits + (unit.is_listed ? 1 : 0);
  if (warp == 0) {
    float tops[kMostSplits / 32], top = kMinusInf, total = 0.0F;
#pragma unroll
    for (uint32_t i = 0; i < kMostSplits / 32; ++i) {
      const uint32_t split = lane + 32 * i;
      tops[i] = split < states ? __ldcg(&s.part_sum[first + size_t{split} * s.group]).x : kMinusInf;
      top = fmaxf(top, tops[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (uint32_t i = 0; i < kMostSplits / 32; ++i) {
      const uint32_t split = lane + 32 * i;
      if (split >= states) continue;
      const float weight = exp2_fast(tops[i] - finite_base(top));
      total = fmaf(weight, __ldcg(&s.part_sum[first + size_t{split} * s.group]).y, total);
      shared.weights[split] = weight;
    }
    total = warp_sum(total);
    if (lane == 0) {
      shared.top = top;
      shared.total = total;
    }
  }
  __syncthreads();
  const float4 sum = sum_of_splits(reinterpret_cast<const float4*>(s.part_o + first * kDim),
                                   size_t{s.group} * (kDim / 4), states, shared);
  if (threadIdx.x < kDim / 4) reinterpret_cast<float4*>(shared.row)[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0) return false;
  PartOfHead<kDim> all{shared.top, shared.total, {}};
#pragma unroll
  for (uint32_t u = 0; u < kLaneQuads<kDim>; ++u) {
    if (4 * lane >= kDim) continue;
    const float4 x = reinterpret_cast<const float4*>(shared.row)[32 * u + lane];
    float* o = all.o + 4 * u;
    o[0] = x.x, o[1] = x.y, o[2] = x.z, o[3] = x.w;
  }
  const PartOfHead<kDim> none{kMinusInf, 0.0F, {}};
  ResidentHead<kDim> resident;
  if (s.resident_o != nullptr) resident.load(s, size_t{unit.kv_head} * s.group + h);
  merge_head<kDim>(s, unit.kv_head, h, all, none, value_scale_of(s, unit.kv_head), resident,
                   shared.row);
  if (lane != 0) return false;
  // What is left of the codes may be rounding, even below zero: that counts as a fall.
  float lse = finite_base(all.top) + log2f(fmaxf(all.total, 0.0F));
  bool is_rounding = false;
  if (unit.is_listed) {
    const float2 of_step = __ldcg(&s.part_sum[first + size_t{unit.splits} * s.group]);
    is_rounding = !(lse > finite_base(of_step.x) + log2f(of_step.y * kLeastKept));
  }
  if (s.resident_o != nullptr) {
    const float other = resident.lse * kLog2E, largest = finite_base(fmaxf(lse, other));
    lse = largest + log2f(exp2f(lse - largest) + exp2f(other - largest));
  }
  const float before = __ldcg(&record.lse[h]);
  record.lse[h] = lse;
  const bool falls = is_rounding || lse < before - kDoubtFall * kLog2E;
  if (is_rounding) atomicOr(&record.reasons, DoubtRecord::kTakenAway);
  if (unit.pass + 1 == kDoubtPasses || !falls) return false;
  return atomicExch(&record.falls[unit.part][unit.pass], 1U) == 0;
}

}  // namespace keyhole::gpu::codes
