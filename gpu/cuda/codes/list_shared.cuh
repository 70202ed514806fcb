// The shared memory of a thread block of the choice among lists (gpu/cuda/codes/list_choice.cuh): its queries, the
// figures of its lists; and what the blocks of a KV head tell each other.
#pragma once

#include <type_traits>

#include "gpu/cuda/codes/params.h"
#include "gpu/cuda/codes/queries.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

inline constexpr uint32_t kListBins = 512;

/// The queries of a group as two fp16 numbers, high and low, relative to a power of 2 of each head. Rows are longer
/// than their contents, so that lanes read from different banks.
template <int kDim, int kHeadTiles>
struct SplitQueries {
  static constexpr int kHeads = 4 * kHeadTiles;
  static constexpr int kColumns = (kHeads + 7) / 8;  ///< of 8 heads
  static constexpr int kRow = kDim + 16;
  alignas(16) __half parts[2][8 * kColumns][kRow];
  float unit[8 * kColumns];  ///< what products are multiplied by

  /// Makes them from the rows of prepared queries, by the threads of a block; barriers before and after are the
  /// caller's.
  template <class Queries>
  __device__ void make(const Queries& queries) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 8 * kColumns * kDim; i += kListThreads) {
      const uint32_t h = i / kDim, j = i % kDim;
      float x = 0.0F, one = 1.0F;
      if (h < kHeads) {
        // The slope is 2 / 16256 of the row's largest number.
        const int exponent =
            static_cast<int>(__float_as_uint(8128.0F * queries.constants[h].slope) >> 23U & 0xFFU);
        one = __uint_as_float(static_cast<uint32_t>(min(max(exponent, 8), 246)) << 23U);
        x = __fdividef(queries.rows[h][j], one);
      }
      const __half high = __float2half_rn(x);
      parts[0][h][j] = high;
      parts[1][h][j] = __float2half_rn(x - __half2float(high));
      if (j == 0) unit[h] = one;
    }
  }
};

/// The part of 16 mean keys that a lane holds: of lists lane / 4 and lane / 4 + 8, components 16 m + 4 (lane % 4) .. +
/// 3.
template <int kDim>
struct MeanRows {
  uint2 of[2][kDim / 16];

  /// means: of the KV head's lists; list: the lane's first.
  __device__ void load(const __half* means, uint32_t list, uint32_t count, int m, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t one = min(list + 8 * r, count - 1);
      of[r][m] =
          *reinterpret_cast<const uint2*>(means + size_t{one} * kDim + 16 * m + lane % 4 * 4);
    }
  }
};

/// Numbers of which all blocks need the largest: of each head the most that a list counts and minus the least, in
/// nats, and the largest logit of a mean, base 2; and the longest row of all lists.
template <int kHeads>
struct ListExtremes {
  static constexpr uint32_t kNumbers = 3 * kHeads + 1;
  static constexpr uint32_t kTop = 0, kLow = kHeads, kLogit = 2 * kHeads, kWidest = 3 * kHeads;
};

/// The first lists of a block in shared memory, behind ListShared: what all stages need of them, so that these wait for
/// memory once, in front of all.
template <int kHeads>
struct KeptLists {
  static constexpr size_t kBytes =
      kHeads * sizeof(float) + sizeof(ListFigures) + sizeof(ListPlace) + sizeof(uint16_t);
  static constexpr size_t kMoreBytes = kHeads * sizeof(float);  ///< besides, with ListShare::miss

  uint32_t count;        ///< that there is memory for, a multiple of kListTile
  float* scores;         ///< `[count, kHeads]`
  ListFigures* figures;  ///< `[count]`
  ListPlace* places;
  uint16_t* bins;
  float* weights;  ///< `[count, kHeads]`, with ListShare::miss alone

  __device__ KeptLists(unsigned char* memory, uint32_t count)
      : count(count),
        scores(reinterpret_cast<float*>(memory)),
        figures(reinterpret_cast<ListFigures*>(scores + count * kHeads)),
        places(reinterpret_cast<ListPlace*>(figures + count)),
        bins(reinterpret_cast<uint16_t*>(places + count)),
        weights(reinterpret_cast<float*>(bins + count)) {}
};
static_assert(sizeof(ListFigures) == 16 && sizeof(ListPlace) == 8 && kListBins <= 1U << 16U);

/// What a block tells those of its KV head, wherever that lies (gpu/cuda/codes/list_blocks.cuh).
template <int kHeads, uint32_t kBlocks>
struct ListTold {
  alignas(16) uint2 bins[kListBins];  ///< rows and pairs of the block's lists
  float block_ends[kBlocks][ListExtremes<kHeads>::kNumbers];  ///< from all blocks
};
/// Nothing: what blocks tell each other by the device's memory lies in the work space.
struct ToldByMemory {};

template <int kDim, int kHeadTiles, class Blocks>
struct ListShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  using Told = ListTold<kHeads, Blocks::kBlocks>;
  static constexpr uint32_t kNumbers = ListExtremes<kHeads>::kNumbers;
  SharedQueries<kDim, 2, kHeadTiles> queries;
  alignas(16) float q[kHeads][kDim];
  SplitQueries<kDim, kHeadTiles> split;
  alignas(16) std::conditional_t<Blocks::kTellByMemory, ToldByMemory, Told> told;
  float warp_ends[kListWarps][kNumbers];
  float ends[kNumbers];
  float warp_reach[kListWarps][kHeads];  ///< of lists that are not read
  // Whole vectors each: the compiler would read a neighbour's last word with an array that begins beside it, which
  // tools that look for races take for one.
  alignas(16) uint32_t sums[kListWarps];
  alignas(16) uint32_t pairs_before[kListWarps];
  alignas(16) uint32_t pairs_of_all[kListWarps];
  uint32_t last_bin;
};

/// The exclusive sum over the threads of the block before this one, and the sum of all in `all`.
template <class Shared>
__device__ inline uint32_t sum_before(uint32_t own, Shared& shared, uint32_t& all) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t before = own;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kWholeWarp, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) shared.sums[warp] = before;
  __syncthreads();
  before -= own;
  all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kListWarps; ++w) {
    if (w < warp) before += shared.sums[w];
    all += shared.sums[w];
  }
  __syncthreads();
  return before;
}

}  // namespace keyhole::gpu::codes
