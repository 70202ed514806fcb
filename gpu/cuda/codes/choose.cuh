// The choice of this step's heaviest rows of a KV head, by the thread blocks of a cluster.
//
// Rows are ranked by `max over the heads of (logit - log-sum-exp)`, ties by the smaller row: a total order, one
// 64-bit number for every row. attend_codes() has left the largest logits of every 32 rows. These groups of rows are
// dealt out to shares: at least N rows reach the N-th largest of the shares' largest, and few others do (with N = 16
// of 64 shares, 18.3 groups on average). The groups that may reach that bound are scored again from their codes, and
// the N heaviest rows are found by counting. That takes two barriers of the cluster, where bisection of a threshold
// takes one for each of its steps.
//
// A threshold left by the step before would save the choice, but loses 3 to 4 answers of 60: where attention turns
// from diffuse to sharp it lets nothing through, or everything.
#pragma once

#include "gpu/cuda/codes/candidates.cuh"
#include "gpu/cuda/codes/cluster.cuh"

namespace keyhole::gpu::codes {

constexpr uint32_t kFinishBlocks = 8;  ///< thread blocks of the cluster of a KV head
constexpr uint32_t kFinishWarps = 8;
constexpr uint32_t kFinishThreads = kFinishWarps * 32;
constexpr uint32_t kClusterThreads = kFinishBlocks * kFinishThreads;
constexpr uint32_t kShares = kClusterThreads / 16;  ///< the most shares: half a warp has one
/// Up to so many wanted rows a whole warp has one share: fewer to rank.
constexpr uint32_t kFewRows = 24;
constexpr uint32_t kMostGroups = 256;  ///< that a thread block can score again
constexpr uint32_t kMostListed = 128;  ///< rows that a thread block can list
static_assert(kShares >= kMostDeviceRows && kMostListed > kMostDeviceRows);

template <int kHeads>
struct ChoiceShared {
  static constexpr uint32_t kListed = kMostListed;
  alignas(16) uint32_t shares[kShares];                       ///< from all blocks of the cluster
  alignas(16) uint64_t all[kFinishBlocks * kMostListed + 2];  ///< rows that the blocks have listed
  uint16_t all_places[kFinishBlocks * kMostListed];  ///< block * kMostListed + number in its list
  uint64_t listed[kMostListed];                      ///< rows that this block lists
  float logits[kMostListed][kHeads];                 ///< of `listed`, base 2
  uint32_t groups[kMostGroups];
  uint32_t group_count;  ///< that this block wanted to score
  uint32_t row_count;    ///< that it wanted to list
  uint32_t found;        ///< of `chosen`
  uint64_t least;
  uint64_t chosen[kMostDeviceRows];
  uint16_t places[kMostDeviceRows];  ///< as all_places, of `chosen`
};

/// The groups of rows of a thread: numbers `turn * kFinishThreads + i` of its block's values, for i < kFinishThreads.
struct Deal {
  uint32_t rank;  ///< of the block in its cluster

  /// The group of value i as values are loaded, thread by thread: blocks take 8 neighbours in turn.
  __device__ uint32_t group_of(uint32_t i) const {
    const uint32_t eight = i % kFinishThreads / 8;
    return i / kFinishThreads * kClusterThreads + eight * (8 * kFinishBlocks) +
           (rank + eight) % kFinishBlocks * 8 + i % 8;
  }
  /// Which value a thread looks at. Shares take neighbours in turn, so that neighbouring rows, and in most blocks
  /// rows at any regular distance, go to different shares. The half warps of a warp find their 32 values in 32 banks.
  __device__ uint32_t value_of(uint32_t turn) const {
    const uint32_t place = threadIdx.x % 16, share = threadIdx.x / 16;
    return turn * kFinishThreads + place * 16 + (share + (2 * rank + 1) * place + 7 * turn) % 16;
  }
};

/// Sends the largest weight of each share to all blocks of the cluster. `few`: a whole warp has one share.
template <int kHeads>
__device__ inline void send_share(ChoiceShared<kHeads>& c, uint32_t mine, uint32_t rank, bool few) {
  const uint32_t half = threadIdx.x / 16 % 2;
  const uint32_t other = __reduce_max_sync(kWholeWarp, half == 0 ? 0U : mine);
  const uint32_t one = __reduce_max_sync(kWholeWarp, half == 0 ? mine : 0U);
  const uint32_t warp = rank * kFinishWarps + threadIdx.x / 32;
  const uint32_t to = threadIdx.x % 16;
  if (to >= kFinishBlocks) return;
  if (few) {
    if (half == 0) *in_block(&c.shares[warp], to) = max(one, other);
  } else {
    *in_block(&c.shares[2 * warp + half], to) = half == 0 ? one : other;
  }
}

/// Gathers the rows that the blocks have listed and leaves the `wanted` first of them in c.chosen, in their order;
/// the result is the same in every block. Between barriers of the cluster. Returns true if some block had more than
/// it could list.
template <int kHeads>
__device__ inline bool rank_listed(ChoiceShared<kHeads>& c, uint32_t wanted) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t wants[kFinishBlocks];
#pragma unroll
  for (uint32_t b = 0; b < kFinishBlocks; ++b) wants[b] = *in_block(&c.row_count, b);
  const uint64_t* list = in_block(c.listed, warp);
  uint64_t order = list[lane];  // what is no row is not used below
  uint32_t begin = 0, all = 0, count = 0;
  bool over = false;
#pragma unroll
  for (uint32_t b = 0; b < kFinishBlocks; ++b) {
    const uint32_t has = min(wants[b], kMostListed);
    over = over || wants[b] > kMostListed;
    if (b < warp) begin += has;
    if (b == warp) count = has;
    all += has;
  }
  for (uint32_t i = lane; i < count; i += 32) {
    if (i != lane) order = list[i];
    c.all[begin + i] = order;
    c.all_places[begin + i] = static_cast<uint16_t>(warp * kMostListed + i);
  }
  if (threadIdx.x == 0) {
    c.all[all] = 0;
    c.found = min(
        all, wanted);  // all that are wanted, unless logits differ from those that left the maxima
  }
  __syncthreads();
  rank_all<kFinishThreads>(c, c.all, all, wanted, [&](uint32_t e) { return c.all_places[e]; });
  __syncthreads();
  return over;
}

}  // namespace keyhole::gpu::codes
