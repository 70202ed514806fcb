// The choice of this step's heaviest rows of a KV head by one thread block. Order, bound and list are those of
// gpu/cuda/codes/choose.cuh; barriers of the block take the place of the cluster's.
//
// The weights of groups of rows are computed again in each pass over them (two passes, unless the list overflows) and
// stored nowhere: a float for every 32 rows would be 128 KiB at 1M tokens, and the maxima lie in the L2 cache (64 KiB
// a KV head at 128k tokens and 4 heads: about a microsecond for one multiprocessor).
#pragma once

#include "gpu/cuda/codes/candidates.cuh"

namespace keyhole::gpu::codes {

constexpr uint32_t kSingleWarps = 16;
constexpr uint32_t kSingleThreads = kSingleWarps * 32;
constexpr uint32_t kSingleShares = 128;
constexpr uint32_t kMostSingleGroups = 512;  // that are scored again
static_assert(kSingleShares >= kMostDeviceRows && kSingleThreads % kSingleShares == 0);

template <int kHeads>
struct SingleChoice {
  static constexpr uint32_t kListed = kHeads <= 8 ? 512 : 256;  ///< 8 or 16 KiB of logits
  static_assert(kListed > kMostDeviceRows && kMostSingleGroups >= kListed);

  alignas(16) uint32_t shares[kSingleShares];
  alignas(16) uint64_t listed[kListed + 2];  ///< candidates, by their order
  float logits[kListed][kHeads];             ///< of `listed`, base 2
  uint32_t groups[kMostSingleGroups];
  uint32_t group_count;  ///< that were to be scored
  uint32_t row_count;    ///< that were to be listed
  uint32_t found;        ///< of `chosen`
  uint64_t least;
  uint64_t chosen[kMostDeviceRows];
  uint16_t places[kMostDeviceRows];  ///< place in `listed` of each of `chosen`
};

/// Calls take(group, weight) for this thread's groups. Neighbouring groups go to neighbouring threads, and groups at
/// a distance of a power of two to different threads, because heavy rows are near each other or at regular distances.
template <int kHeadTiles, class Take>
__device__ inline void for_groups(const float* maxima, uint32_t group_count, const float* lse,
                                  const Take& take) {
  constexpr uint32_t kBatch =
      8 / kHeadTiles;  // loads under way at once: each takes half a microsecond
  const auto* const from = reinterpret_cast<const float4*>(maxima);
  const auto group_of = [](uint32_t turn) {
    return turn * kSingleThreads + (threadIdx.x + 37 * turn) % kSingleThreads;
  };
  const uint32_t turns = (group_count + kSingleThreads - 1) / kSingleThreads;
  for (uint32_t turn = 0; turn < turns; turn += kBatch) {
    float4 x[kBatch][kHeadTiles];
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t group = group_of(turn + b);
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        if (group < group_count) x[b][t] = from[size_t{group} * kHeadTiles + t];
      }
    }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; ++b) {
      const uint32_t group = group_of(turn + b);
      if (group < group_count) take(group, group_weight(x[b], lse));
    }
  }
}

/// Leaves the candidates in the first `all` of c.listed, and the `wanted` first of them in c.chosen, in their order.
template <int kHeads>
__device__ inline void rank_candidates(SingleChoice<kHeads>& c, uint32_t all, uint32_t wanted) {
  if (threadIdx.x == 0) {
    c.listed[all] = 0;  // the other of a pair
    // All wanted rows are found, unless logits differ from those that left the maxima.
    c.found = min(all, wanted);
  }
  __syncthreads();
  rank_all<kSingleThreads>(c, c.listed, all, wanted, [](uint32_t e) { return e; });
  __syncthreads();
}

/// Leaves the `wanted` (1 or more) heaviest rows of group_count (1 or more) groups in c.chosen, c.found of them, and
/// their logits. by_table: reads_by_table(). lse: of the heads, base 2, as group_weight() wants it. By the whole thread
/// block; the caller needs no barrier before or after.
template <int kDim, int kBits, int kHeadTiles>
__device__ inline void choose_rows(const CodesParams& s, uint32_t kv_head, const float* maxima,
                                   uint32_t group_count, bool by_table, uint32_t wanted,
                                   const SharedQueries<kDim, kBits, kHeadTiles>& queries,
                                   const float* lse, SingleChoice<4 * kHeadTiles>& c) {
  using Choice = SingleChoice<4 * kHeadTiles>;
  if (threadIdx.x < kSingleShares) c.shares[threadIdx.x] = 0;
  if (threadIdx.x == 0) c.group_count = c.row_count = 0;
  __syncthreads();
  uint32_t largest = 0;
  for_groups<kHeadTiles>(maxima, group_count, lse,
                         [&](uint32_t, float weight) { largest = max(largest, rising(weight)); });
  // The threads of a share lie in four warps, 91 groups apart.
  const uint32_t part = threadIdx.x / kSingleShares;
  atomicMax(&c.shares[(threadIdx.x + 37 * part) % kSingleShares], largest);
  __syncthreads();
  find_least<kSingleShares, kSingleThreads>(c, wanted);
  __syncthreads();
  while (true) {
    const uint64_t least = c.least;
    for_groups<kHeadTiles>(maxima, group_count, lse, [&](uint32_t group, float weight) {
      // If not even the first row of the group could reach the bound, none can.
      if (order_of(weight, group * kMaximumRows) < least) return;
      const uint32_t slot = atomicAdd(&c.group_count, 1U);
      if (slot < kMostSingleGroups) c.groups[slot] = group;
    });
    __syncthreads();
    const uint32_t groups = min(c.group_count, kMostSingleGroups);
    for (uint32_t g = threadIdx.x / 32; g < groups; g += kSingleWarps) {
      list_rows<kDim, kBits, kHeadTiles>(s, kv_head, c.groups[g], by_table, queries, lse, c);
    }
    __syncthreads();
    const bool over = c.group_count > kMostSingleGroups || c.row_count > Choice::kListed;
    rank_candidates(c, min(c.row_count, Choice::kListed), wanted);
    if (!over) return;
    // There are many equal weights, or heavy rows side by side. The last of the first few is then a better bound,
    // which the rows that were not listed must reach, too.
    if (threadIdx.x == 0) {
      c.group_count = c.row_count = 0;
      c.least = c.chosen[wanted - 1];
    }
    __syncthreads();
  }
}

}  // namespace keyhole::gpu::codes
