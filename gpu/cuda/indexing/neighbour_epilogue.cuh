// What a warp does with a tile of scores, 32 queries by 64 keys in the layout of mma.m16n8: it keeps the scores that
// are not below their query's threshold.
#pragma once

#include "gpu/cuda/common/warp.cuh"
#include "gpu/cuda/indexing/neighbour_kernels.h"

namespace keyhole::gpu {

__device__ inline Rank pack_rank(float score, uint32_t key) {
  const uint32_t bits = __float_as_uint(score == score ? score + 0.0F : -INFINITY);
  const uint32_t ordered =
      bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
  return (static_cast<Rank>(ordered) << 32) | static_cast<uint32_t>(~key);
}
__device__ inline float rank_score(Rank rank) {
  const auto ordered = static_cast<uint32_t>(rank >> 32);
  return __uint_as_float((ordered & 0x80000000U) != 0 ? ordered & 0x7FFFFFFFU : ~ordered);
}
__device__ inline uint32_t rank_key(Rank rank) { return ~static_cast<uint32_t>(rank); }

/// The facts that a thread block keeps of its queries, in shared memory.
struct QueryTile {
  Rank threshold[kTileQueries];
  uint32_t row[kTileQueries];  ///< number in the batch
  uint32_t limit
      [kTileQueries];  ///< first key it does not see, at most the end of the share; 0: no such query
  uint32_t size[kTileQueries];  ///< entries of its list
  uint32_t furthest;            ///< the largest limit
};

/// Fills the tile's description. False: the block has nothing to do (no queries).
__device__ inline bool begin_tile(const TileArgs& args, QueryTile& tile) {
  const uint32_t rows = args.chosen != nullptr ? *args.chosen_count : args.rows;
  const uint32_t first = blockIdx.x * kTileQueries;
  if (first >= rows) return false;
  const uint32_t t = threadIdx.x;
  if (t == 0) tile.furthest = 0;
  __syncthreads();
  const bool is_there = first + t < rows;
  const uint32_t row = !is_there ? 0 : args.chosen != nullptr ? args.chosen[first + t] : first + t;
  const uint32_t end = args.first_key + args.key_count;
  const uint32_t limit = !is_there ? 0 : args.limits != nullptr ? min(args.limits[row], end) : end;
  tile.row[t] = row;
  tile.limit[t] = limit;
  tile.size[t] = 0;
  tile.threshold[t] = !is_there                                              ? ~0ULL
                      : args.chosen != nullptr || args.thresholds == nullptr ? kLowestRank
                                                                             : args.thresholds[row];
  const uint32_t most = __reduce_max_sync(kWholeWarp, limit);
  if (t % 32 == 0) atomicMax(&tile.furthest, most);
  __syncthreads();
  return true;
}

/// Cuts a full list back to its best `most`. Each lane holds 8 of its ranks; the smallest rank that stays is found
/// bit by bit. By all lanes of the warp.
__device__ inline void cut_back(Rank* list, uint32_t size, uint32_t most, QueryTile& tile,
                                uint32_t slot) {
  constexpr uint32_t kEach = kListCapacity / 32;
  const uint32_t lane = threadIdx.x % 32;
  Rank own[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t at = i * 32 + lane;
    own[i] = at < size ? list[at] : 0;
  }
  Rank least = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const Rank candidate = least | (1ULL << bit);
    uint32_t n = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) n += own[i] >= candidate ? 1 : 0;
    if (__reduce_add_sync(kWholeWarp, n) >= most) least = candidate;
  }
  __syncwarp();
  uint32_t kept = 0;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const bool keep = own[i] >= least && own[i] != 0;
    const uint32_t mask = __ballot_sync(kWholeWarp, keep);
    if (keep) list[kept + __popc(mask & ((1U << lane) - 1))] = own[i];
    kept += __popc(mask);
  }
  if (lane == 0) {
    tile.size[slot] = kept;
    tile.threshold[slot] = max(tile.threshold[slot], least);
  }
  __syncwarp();
}

/// A warp's part of a tile: this thread has rows 32 * warp + {0, 8, 16, 24} + lane / 4, in columns 8 * i + 2 * (lane
/// % 4) and the next.
struct Keeper {
  const TileArgs& args;
  QueryTile& tile;
  uint32_t slot;       ///< of the thread's first row
  float threshold[4];  ///< of its rows
  float extra[4];

  __device__ Keeper(const TileArgs& a, QueryTile& t)
      : args(a), tile(t), slot(threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4) {
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      extra[r] = args.query_extra != nullptr && tile.limit[slot + 8 * r] != 0
                     ? args.query_extra[tile.row[slot + 8 * r]]
                     : 0.0F;
    }
    read_thresholds();
  }
  __device__ void read_thresholds() {
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      const Rank rank = tile.threshold[slot + 8 * r];
      threshold[r] = rank == ~0ULL ? INFINITY : rank_score(rank);
    }
  }
  __device__ Rank* list(uint32_t at) const {
    return args.lists + (size_t{tile.row[at]} * args.shares + blockIdx.y) * kListCapacity;
  }

  /// Takes scores[m][i][c], which are of row 16 m + 8 (c / 2) and column 8 i + c % 2 of the thread's. key: number of
  /// the tile's column 0 (with a sample, of the block's, and `step` counts its tiles); key_extra: of the tile's keys,
  /// or null.
  __device__ void take(float (&scores)[2][8][4], uint32_t key, uint32_t step,
                       const float* key_extra) {
    const uint32_t pair = threadIdx.x % 4 * 2;
    if (key_extra != nullptr) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        const float2 e = *reinterpret_cast<const float2*>(key_extra + 8 * i + pair);
#pragma unroll
        for (uint32_t m = 0; m < 2; ++m) {
          scores[m][i][0] = fmaf(extra[2 * m], e.x, scores[m][i][0]);
          scores[m][i][1] = fmaf(extra[2 * m], e.y, scores[m][i][1]);
          scores[m][i][2] = fmaf(extra[2 * m + 1], e.x, scores[m][i][2]);
          scores[m][i][3] = fmaf(extra[2 * m + 1], e.y, scores[m][i][3]);
        }
      }
    }
    if (args.maxima != nullptr) return write_maxima(scores, key, step, pair);
    float highest[4];
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      highest[r] = fmaxf(scores[r / 2][0][r % 2 * 2], scores[r / 2][0][r % 2 * 2 + 1]);
#pragma unroll
      for (uint32_t i = 1; i < 8; ++i) {
        highest[r] =
            fmaxf(highest[r], fmaxf(scores[r / 2][i][r % 2 * 2], scores[r / 2][i][r % 2 * 2 + 1]));
      }
    }
    const bool any = highest[0] >= threshold[0] || highest[1] >= threshold[1] ||
                     highest[2] >= threshold[2] || highest[3] >= threshold[3];
    if (__any_sync(kWholeWarp, any)) keep(scores, highest, key + pair);
  }

  __device__ void keep(const float (&scores)[2][8][4], const float (&highest)[4], uint32_t key) {
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      if (!(highest[r] >= threshold[r])) continue;
      const uint32_t at = slot + 8 * r;
      const Rank least = tile.threshold[at];
      const uint32_t limit = tile.limit[at];
      Rank* const out = list(at);
#pragma unroll
      for (uint32_t c = 0; c < 16; ++c) {
        const float score = scores[r / 2][c / 2][r % 2 * 2 + c % 2];
        const uint32_t id = key + 8 * (c / 2) + c % 2;
        if (score >= threshold[r] && id < limit) {
          const Rank rank = pack_rank(score, id);
          if (rank >= least) out[atomicAdd(&tile.size[at], 1U)] = rank;
        }
      }
    }
    __syncwarp();
    const uint32_t own = threadIdx.x;  // thread t watches over the list of row t
    uint32_t full = __ballot_sync(kWholeWarp, tile.size[own] > kListFull);
    if (full == 0) return;
    while (full != 0) {
      const uint32_t at = threadIdx.x / 32 * 32 + __ffs(static_cast<int>(full)) - 1;
      full &= full - 1;
      cut_back(list(at), tile.size[at], args.most, tile, at);
    }
    read_thresholds();
  }

  __device__ void write_maxima(const float (&scores)[2][8][4], uint32_t key, uint32_t step,
                               uint32_t pair);
};

/// The key that stands for sixteen: one of them, the same each time. Its place varies by hash, so that periodic text
/// is sampled evenly.
__device__ inline uint32_t sampled_key(uint32_t i) {
  return i * kSampleEvery + ((i * 0x9E3779B9U) >> 28);
}

__device__ inline void Keeper::write_maxima(const float (&scores)[2][8][4], uint32_t key,
                                            uint32_t step, uint32_t pair) {
  const uint32_t end = args.first_key + args.key_count;
#pragma unroll
  for (uint32_t r = 0; r < 4; ++r) {
    const uint32_t at = slot + 8 * r;
    const uint32_t limit = min(tile.limit[at], end);
    float highest = -INFINITY;
#pragma unroll
    for (uint32_t c = 0; c < 16; ++c) {
      const uint32_t i = step * kTileKeys + pair + 8 * (c / 2) + c % 2;
      const float score = scores[r / 2][c / 2][r % 2 * 2 + c % 2];
      if (key + sampled_key(i) < limit) highest = fmaxf(highest, score);
    }
    if (tile.limit[at] != 0) {
      args.maxima[size_t{tile.row[at]} * args.groups + step * 4 + pair / 2] = highest;
    }
  }
}

}  // namespace keyhole::gpu
