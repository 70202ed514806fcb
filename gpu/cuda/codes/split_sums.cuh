// Merges the states of the pass's splits: the weight of each, and their weighted sum.
#pragma once

#include "gpu/cuda/codes/queries.cuh"

namespace keyhole::gpu::codes {

/// kBlocks: thread blocks that divide the group's rows, in columns, as in SplitSums: each needs the weights of its
/// own heads alone.
template <int kHeads, uint32_t kThreads, uint32_t kBlocks = 1>
struct SplitShared {
  static constexpr uint32_t kOwn =
      kBlocks == 1 ? kHeads : (kHeads + kBlocks - 1) / kBlocks + 1;  ///< heads of a block at most
  alignas(16) float4 sums[kThreads];
  float weights[kOwn][kMostSplits];

  /// The first head whose columns are, in part, those of block `rank`.
  template <int kDim>
  __device__ static uint32_t first_head(const CodesParams& s, uint32_t rank) {
    if (kBlocks == 1) return 0;
    const uint32_t quads = s.group * (kDim / 4);
    return rank * ((quads + kBlocks - 1) / kBlocks) / (kDim / 4);
  }
};

/// The number of splits that the pass has left of a step. In a launch of one step every place has one.
struct AllSplits {
  __device__ static uint32_t of(const CodesParams& s) { return s.splits; }
};

/// What a lane knows of the splits of a head that a warp weighs: of several at once, as a trip to memory takes half a
/// microsecond.
struct SplitFigures {
  static constexpr uint32_t kAtOnce = 3;  ///< 96 of a warp: enough for 3 KV heads and more
  static constexpr uint32_t kStep = 32 * kAtOnce;
  float2 part[kAtOnce];  ///< largest logit and sum of weights
  float lse[kAtOnce];    ///< of the codes alone

  /// Asks for splits from, from + 32, .. of head h.
  template <class Splits>
  __device__ void load(const CodesParams& s, uint32_t kv_head, const Splits& count, uint32_t h,
                       uint32_t from) {
    const size_t first = size_t{kv_head} * s.splits * s.group + h;
    const float2* const part_sum = s.part_sum + first;
    const float* const part_lse = s.part_lse + first;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t split = from + 32 * i;
      const bool is_one = h < s.group && split < count.of(s);
      part[i] = is_one ? part_sum[split * s.group] : make_float2(kMinusInf, 0.0F);
      lse[i] = is_one ? part_lse[split * s.group] : kMinusInf;
    }
  }
  /// Asks for the first splits of a warp's first head.
  template <class Splits>
  __device__ void load(const CodesParams& s, uint32_t kv_head, const Splits& count) {
    load(s, kv_head, count, threadIdx.x / 32, threadIdx.x % 32);
  }
};

/// Weighs the splits of every head, by kThreads threads: the weights of those that block `rank` sums up to
/// splits.weights, the sums of weights to shared.top and total, the log-sum-exp of the codes alone to shared.lse.
/// Base 2. figures: as load() left them.
template <int kDim, int kHeads, uint32_t kThreads, uint32_t kBlocks, class Splits, class Shared>
__device__ inline void weigh_splits(const CodesParams& s, uint32_t kv_head, const Splits& count,
                                    uint32_t rank, SplitFigures& figures,
                                    SplitShared<kHeads, kThreads, kBlocks>& splits,
                                    Shared& shared) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t first_head = splits.template first_head<kDim>(s, rank);
#pragma unroll 1
  for (uint32_t h = threadIdx.x / 32; h < s.group; h += kThreads / 32) {
    const bool is_own = h - first_head < splits.kOwn;  // of heads before the first one it is large
    float* const weights = splits.weights[is_own ? h - first_head : 0];
    float top = kMinusInf, largest = kMinusInf, total = 0.0F, of_codes = 0.0F;
#pragma unroll 1
    for (uint32_t from = lane; from < count.of(s); from += figures.kStep) {
      const float before = top, largest_before = largest;
#pragma unroll
      for (uint32_t i = 0; i < figures.kAtOnce; ++i) {
        top = fmaxf(top, figures.part[i].x);
        largest = fmaxf(largest, figures.lse[i]);
      }
      const float base = finite_base(top), codes_base = finite_base(largest);
      total *= exp2_fast(before - base);
      of_codes *= exp2_fast(largest_before - codes_base);
#pragma unroll
      for (uint32_t i = 0; i < figures.kAtOnce; ++i) {
        total = fmaf(exp2_fast(figures.part[i].x - base), figures.part[i].y, total);
        of_codes += exp2_fast(figures.lse[i] - codes_base);
        if (is_own && from + 32 * i < count.of(s))
          weights[from + 32 * i] = figures.part[i].x;  // its maximum, until all are known
      }
      if (from + figures.kStep < count.of(s)) {
        figures.load(s, kv_head, count, h, from + figures.kStep);
      }
    }
    if (h + kThreads / 32 < s.group) figures.load(s, kv_head, count, h + kThreads / 32, lane);
    const float overall = warp_max(top), overall_largest = warp_max(largest);
    const float base = finite_base(overall);
    total = warp_sum(total * exp2_fast(top - base));
    of_codes = warp_sum(of_codes * exp2_fast(largest - finite_base(overall_largest)));
#pragma unroll 1
    for (uint32_t split = lane; is_own && split < count.of(s); split += 32) {
      weights[split] = exp2_fast(weights[split] - base);
    }
    if (lane == 0) {
      shared.top[h] = overall;
      shared.total[h] = total;
      shared.lse[h] = overall_largest + log2_fast(of_codes);
    }
  }
}

/// The sum of the splits, in two steps; between them the weights become known. Each of kBlocks thread blocks has a
/// part of the group's rows, in columns of 4 components; threads with the same column take splits in turn.
template <uint32_t kBlocks, uint32_t kThreads>
struct SplitSums {
  static constexpr uint32_t kAhead = 4,
                            kMore = 8;  ///< splits under way at once: at first, and then
  uint32_t columns;                     ///< of the block, a power of 2
  uint32_t quad;                        ///< of the group's rows, this thread's
  bool inside;
  float4 first[kAhead];

  template <int kDim>
  __device__ const float4* from(const CodesParams& s, uint32_t kv_head, uint32_t split) const {
    return reinterpret_cast<const float4*>(s.part_o) +
           (size_t{kv_head} * s.splits + split) * s.group * (kDim / 4) + quad;
  }
  template <int kDim, class Splits>
  __device__ void load(const CodesParams& s, uint32_t kv_head, const Splits& count, uint32_t rank) {
    const uint32_t quads = s.group * (kDim / 4);
    const uint32_t share = (quads + kBlocks - 1) / kBlocks;
    columns = share <= 1 ? 1 : 1U << (32 - __clz(static_cast<int>(share - 1)));
    const uint32_t column = threadIdx.x & (columns - 1);
    quad = rank * share + column;
    inside = column < share && quad < quads;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t split = (threadIdx.x + i * kThreads) / columns;
      first[i] = inside && split < count.of(s) ? *from<kDim>(s, kv_head, split)
                                               : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    }
  }
  /// Leaves the sums that send() reads in shared.sums.
  template <int kDim, class Splits, int kHeads, uint32_t kWeighing>
  __device__ void add(const CodesParams& s, uint32_t kv_head, const Splits& count, uint32_t rank,
                      SplitShared<kHeads, kThreads, kWeighing>& shared) const {
    float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    const float* weights =
        shared.weights[inside ? quad / (kDim / 4) - shared.template first_head<kDim>(s, rank) : 0];
    const auto take = [&](uint32_t split, float4 x) {
      const float weight = weights[split];
      sum.x = fmaf(weight, x.x, sum.x);
      sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z);
      sum.w = fmaf(weight, x.w, sum.w);
    };
    const uint32_t own = threadIdx.x / columns;
    const uint32_t step = kThreads / columns;
    if (inside) {
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (own + i * step < count.of(s)) take(own + i * step, first[i]);
      }
#pragma unroll 1
      for (uint32_t next = own + kAhead * step; next < count.of(s); next += kMore * step) {
        float4 more[kMore];
#pragma unroll
        for (uint32_t i = 0; i < kMore; ++i) {
          const uint32_t split = min(next + i * step, count.of(s) - 1);
          more[i] = *from<kDim>(s, kv_head, split);
        }
#pragma unroll
        for (uint32_t i = 0; i < kMore; ++i) {
          if (next + i * step < count.of(s)) take(next + i * step, more[i]);
        }
      }
    }
    for (uint32_t offset = columns; offset < 32; offset *= 2) {
      sum.x += __shfl_xor_sync(kWholeWarp, sum.x, offset);
      sum.y += __shfl_xor_sync(kWholeWarp, sum.y, offset);
      sum.z += __shfl_xor_sync(kWholeWarp, sum.z, offset);
      sum.w += __shfl_xor_sync(kWholeWarp, sum.w, offset);
    }
    shared.sums[threadIdx.x] = sum;
  }
  /// Calls put(head, component, sum of four) for every column of this block; after a barrier.
  template <int kDim, int kHeads, uint32_t kWeighing, class Put>
  __device__ void send(const SplitShared<kHeads, kThreads, kWeighing>& shared,
                       const Put& put) const {
    if (threadIdx.x >= columns || !inside) return;
    const uint32_t stride = max(columns, 32U);
    float4 sum = shared.sums[threadIdx.x];
    for (uint32_t i = threadIdx.x + stride; i < kThreads; i += stride) {
      const float4 x = shared.sums[i];
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    put(quad / (kDim / 4), quad % (kDim / 4) * 4, sum);
  }
};

}  // namespace keyhole::gpu::codes
