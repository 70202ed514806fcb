// Rows that may be among this step's heaviest: their order, the bound that they reach, and the list of those that
// reach it. Both choices use it, that by a cluster (gpu/cuda/codes/choose.cuh) and that by a single thread block;
// `Choice` is the shared memory of either.
#pragma once

#include "gpu/cuda/codes/pair_places.cuh"
#include "gpu/cuda/codes/tile_logits.cuh"

namespace keyhole::gpu::codes {

/// Maps floats to integers of the same order; 0 is below all.
__device__ inline uint32_t rising(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ ((bits >> 31U) != 0 ? 0xFFFFFFFFU : 0x80000000U);
}
/// A row's place in the order: larger is heavier, 0 is no row.
__device__ inline uint64_t order_of(float weight, uint32_t row) {
  return uint64_t{rising(weight)} << 32U | static_cast<uint32_t>(~row);
}
__device__ inline uint32_t row_of(uint64_t order) { return ~static_cast<uint32_t>(order); }

/// The most that a group of rows weighs in any head: the largest of x, its largest logits, less the heads'
/// log-sum-exp, base 2. lse: of those that are there to fill tiles +inf; what x has of them may be anything, NaN too.
template <int kHeadTiles>
__device__ inline float group_weight(const float4 (&x)[kHeadTiles], const float* lse) {
  float best = kMinusInf;
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const float of[4] = {x[t].x, x[t].y, x[t].z, x[t].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      best = fmaxf(best, of[j] - lse[4 * t + j]);
    }
  }
  return best;
}

/// The wanted-th largest of the first kCount of c.shares, or 0: all rows of that weight reach it. By kThreads
/// threads; the caller adds a barrier.
template <uint32_t kCount, uint32_t kThreads, class Choice>
__device__ inline void find_least(Choice& c, uint32_t wanted) {
  constexpr uint32_t kEach = kThreads / kCount;  // threads for a share
  const uint32_t mine = c.shares[threadIdx.x / kEach];
  const auto* quads = reinterpret_cast<const uint4*>(c.shares);
  uint32_t larger = 0, equal = 0;
#pragma unroll 2
  for (uint32_t i = threadIdx.x % kEach; i < kCount / 4; i += kEach) {
    const uint4 x = quads[i];
    larger +=
        (x.x > mine ? 1 : 0) + (x.y > mine ? 1 : 0) + (x.z > mine ? 1 : 0) + (x.w > mine ? 1 : 0);
    equal += (x.x == mine ? 1 : 0) + (x.y == mine ? 1 : 0) + (x.z == mine ? 1 : 0) +
             (x.w == mine ? 1 : 0);
  }
  uint32_t both = larger | equal << 16U;
#pragma unroll
  for (uint32_t step = 1; step < kEach; step *= 2) both += __shfl_xor_sync(kWholeWarp, both, step);
  larger = both & 0xFFFFU;
  equal = both >> 16U;
  if (larger < wanted && wanted <= larger + equal) c.least = uint64_t{mine} << 32U;
}

/// Lists the rows of a group that reach c.least, and their logits, by a warp. Lists as many as there is space for,
/// but counts all. by_table: reads_by_table().
template <int kDim, int kBits, int kHeadTiles, class Choice>
__device__ inline void list_rows(const CodesParams& s, uint32_t kv_head, uint32_t group,
                                 bool by_table,
                                 const SharedQueries<kDim, kBits, kHeadTiles>& queries,
                                 const float* lse, Choice& c) {
  constexpr CodeShape kShape{kDim, kBits, kBits};
  constexpr int kSteps = static_cast<int>(kShape.key_steps()) / 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const PairPlace<kDim, kBits> place(s, kv_head, group, 4 * kHeadTiles, by_table);
  CodeTile<kDim, kBits> tiles[2];  // keys and factors alone
  tiles[0].load_keys(place.keys, place.factors, 0, lane);
  tiles[1].load_keys(place.keys, place.factors, 1, lane);
  uint32_t q[kHeadTiles][kSteps][2];
  HeadConstants head[kHeadTiles];
  load_products<kDim, kBits, kHeadTiles>(queries, lane, q, head);
  float middle[kHeadTiles];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    middle[t] = place.scores != nullptr
                    ? place.scores[4 * t + lane % 4]
                    : mean_logit<kDim>(&queries.rows[4 * t], place.key_mean, lane);
  }
  float2 logits[2][kHeadTiles];
  tile_logits<kDim, kBits, kHeadTiles>(tiles, q, head, place.noise, s.logits.softcap * kLog2E,
                                       middle, logits);
  uint64_t orders[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float best = kMinusInf;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const int h = 4 * t + lane % 4;
        if (h < static_cast<int>(s.group)) {
          best = fmaxf(best, (upper == 0 ? logits[half][t].x : logits[half][t].y) - lse[h]);
        }
      }
      best = fmaxf(best, __shfl_xor_sync(kWholeWarp, best, 1));
      best = fmaxf(best, __shfl_xor_sync(kWholeWarp, best, 2));
      const uint32_t row = half * kCodeTile + lane / 4 + 8 * upper;
      orders[half][upper] = row < place.rows ? order_of(best, group * kMaximumRows + row) : 0;
    }
  }
  const uint64_t least = max(c.least, uint64_t{1});  // 0 is no row
  constexpr uint32_t kLeaders = 0x11111111U;         // the first of the 4 lanes of each row
  uint32_t masks[2][2], count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    masks[i / 2][i % 2] = __ballot_sync(kWholeWarp, orders[i / 2][i % 2] >= least) & kLeaders;
    count += __popc(masks[i / 2][i % 2]);
  }
  if (count == 0) return;
  uint32_t slot = 0;
  if (lane == 0) slot = atomicAdd(&c.row_count, count);
  slot = __shfl_sync(kWholeWarp, slot, 0);
  const uint32_t leader = lane & ~3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t mask = masks[i / 2][i % 2];
    const uint32_t at = slot + __popc(mask & ((1U << leader) - 1));
    if ((mask >> leader & 1U) != 0 && at < Choice::kListed) {
      if (lane % 4 == 0) c.listed[at] = orders[i / 2][i % 2];
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const float2 both = logits[i / 2][t];
        c.logits[at][4 * t + lane % 4] = i % 2 == 0 ? both.x : both.y;
      }
    }
    slot += __popc(mask);
  }
}

/// Sorts out the `wanted` first of the `all` candidates in `listed`, which is aligned to 16 and has a 0 behind the
/// last: they go to c.chosen in their order, and place_of(number) of each to c.places. By kThreads threads, between
/// barriers.
template <uint32_t kThreads, class Choice, class PlaceOf>
__device__ inline void rank_all(Choice& c, const uint64_t* listed, uint32_t all, uint32_t wanted,
                                const PlaceOf& place_of) {
  const auto* pairs = reinterpret_cast<const ulonglong2*>(listed);
  for (uint32_t e = threadIdx.x; e < all; e += kThreads) {
    const uint64_t of = listed[e];
    uint32_t rank = 0;
#pragma unroll 2
    for (uint32_t i = 0; i < (all + 1) / 2; ++i) {
      const ulonglong2 other = pairs[i];
      rank += other.x > of ? 1 : 0;
      rank += other.y > of ? 1 : 0;
    }
    if (rank < wanted) {
      c.chosen[rank] = of;
      c.places[rank] = static_cast<uint16_t>(place_of(e));
    }
  }
}

}  // namespace keyhole::gpu::codes
