// Lists that a step does not read, by their mean values: their rows weigh n e^(s + t/2), bounded as index/scan/list_choice.h
// says. Some of the pass's thread blocks do this, and leave a state like those of the others.
#pragma once

#include "gpu/cuda/codes/list_choice.cuh"
#include "gpu/cuda/codes/pair_places.cuh"

namespace keyhole::gpu::codes {

/// The log weight of an unread list's row on average, nats relative to the head's largest mean logit. top: that logit, base 2.
__device__ inline float weight_of_list(const ListLogit& list, float log_rows, float top) {
  const float above = list.logit - top;
  // Many of a list's rows make up the weight by second order, up to a variance of twice the logarithm of their number; from
  // there on the largest row alone does.
  const float nats = list.spread <= 2.0F * log_rows
                         ? fmaf(above, kLn2, 0.5F * list.spread)
                         : fmaf(above, kLn2, sqrtf(2.0F * list.spread * log_rows) - log_rows);
  return fminf(nats, 0.0F);
}

/// The states of the warps, four heads at a time, and their sums of weights.
template <int kDim, int kHeadTiles>
struct MeansShared {
  static constexpr uint32_t kWarps = kAttendWarps<kDim>;
  alignas(16) float o[kWarps][4][kDim];
  float sums[kWarps][4 * kHeadTiles];
};

/// Attends the lists of share `number` of `count`, by a thread block, and leaves the state at `place`. constants: of the heads
/// of the block.
template <int kDim, int kHeadTiles, class Heads>
__device__ inline void attend_means(const CodesParams& s, const Heads& heads, uint32_t kv_head,
                                    uint32_t number, uint32_t count, uint32_t place,
                                    const HeadConstants* constants,
                                    MeansShared<kDim, kHeadTiles>& states) {
  constexpr int kHeads = 4 * kHeadTiles, kQuads = kLaneQuads<kDim>;
  constexpr uint32_t kWarps = MeansShared<kDim, kHeadTiles>::kWarps;
  auto& sums = states.sums;
  const CodesLists& l = s.lists;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t lists = __ldcg(&l.counts[kv_head]);
  const auto begin = static_cast<uint32_t>(uint64_t{lists} * number / count);
  const auto end = static_cast<uint32_t>(uint64_t{lists} * (number + 1) / count);
  const size_t first = size_t{kv_head} * l.list_capacity;
  const auto* const means = reinterpret_cast<const __half*>(l.value_means) + first * kDim;
  const ChosenLists& ends = s.list_ends[kv_head];
  const float cap = s.logits.softcap * kLog2E;
  float top[kHeads], noise[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const bool is_one = heads.has(h);
    top[h] = is_one ? __ldcg(&ends.tops[heads.first + h]) : 0.0F;
    noise[h] = constants[h].noise;
  }
  float4 acc[kHeads][kQuads] = {};
  float sum[kHeads] = {};
  for (uint32_t from = begin + 32 * warp; from < end; from += 32 * kWarps) {
    const uint32_t list = from + lane;
    float weights[kHeads] = {};
    const float left = list < end ? s.list_left[first + list] : 0.0F;
    if (left != 0.0F) {
      const ListFigures figures = l.figures[first + list];
      const float* scores = s.list_scores + (first + list) * heads.maxima() + heads.first;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const float4 four = reinterpret_cast<const float4*>(scores)[t];
        const float of_head[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int h = 4 * t + j;
          const ListLogit logit = logit_of_list(of_head[j], noise[h], figures.spread, cap);
          weights[h] = left * exp2_fast(weight_of_list(logit, figures.log_rows, top[h]) * kLog2E);
          sum[h] += weights[h];
        }
      }
    }
    uint32_t rest = __ballot_sync(kWholeWarp, left != 0.0F);
    while (rest != 0) {
      // Some rows are asked for together.
      constexpr int kAtOnce = kQuads == 1 ? 4 : 2;
      uint2 raw[kAtOnce][kQuads];
      int of[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        of[a] = rest == 0 ? -1 : __ffs(static_cast<int>(rest)) - 1;
        rest &= rest - 1;
        if (of[a] < 0) continue;
        const __half* row = means + size_t{from + of[a]} * kDim;
#pragma unroll
        for (int u = 0; u < kQuads; ++u) {
          if (4 * lane < kDim) raw[a][u] = reinterpret_cast<const uint2*>(row)[32 * u + lane];
        }
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        if (of[a] < 0) break;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float w = __shfl_sync(kWholeWarp, weights[h], of[a]);
#pragma unroll
          for (int u = 0; u < kQuads; ++u) {
            const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&raw[a][u].x));
            const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&raw[a][u].y));
            float4& o = acc[h][u];
            o.x = fmaf(w, x.x, o.x), o.y = fmaf(w, x.y, o.y);
            o.z = fmaf(w, y.x, o.z), o.w = fmaf(w, y.y, o.w);
          }
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    sum[h] = warp_sum(sum[h]);
    if (lane == 0) sums[warp][h] = sum[h];
  }
  // Four heads at a time, as there is memory for.
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int u = 0; u < kQuads; ++u) {
        if (4 * lane < kDim) {
          *reinterpret_cast<float4*>(&states.o[warp][j][128 * u + 4 * lane]) = acc[4 * t + j][u];
        }
      }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 4 * kDim; i += kWarps * 32) {
      const uint32_t h = 4 * t + i / kDim;
      if (!heads.has(h)) break;
      float o = 0.0F, total = 0.0F;
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) {
        o += states.o[w][i / kDim][i % kDim];
        total += sums[w][h];
      }
      const size_t part = (size_t{kv_head} * s.splits + place) * s.group + heads.first + h;
      s.part_o[part * kDim + i % kDim] = o;
      if (i % kDim != 0) continue;
      const float largest = total > 0.0F ? __ldcg(&ends.tops[heads.first + h]) : kMinusInf;
      s.part_sum[part] = make_float2(largest, total);
      s.part_lse[part] = largest + log2f(total);
    }
    __syncthreads();
  }
}

}  // namespace keyhole::gpu::codes
