// The choice of the lists that a step reads, by the rule of index/scan/list_choice.h: lists in the order of ln n + s + t, each
// by the head for which it stands out most above that head's lightest list, until a share of the rows is read.
//
// The thread blocks of a KV head score its lists' mean keys, some hundred each. The last of them to be done knows the
// extremes of all lists, sorts the lists into bins of an eighth of a nat, and writes the table of pairs of tiles that the
// pass reads: those of the chosen lists, list by list, then those of the blocks that no list has.
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/doubt.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

inline constexpr uint32_t kListBins = 512;

// These are the numbers of index/scan/list_choice.cpp.
constexpr float kDeepestList =
    32.0F;  ///< nats below a head's heaviest list at which lists count as its lightest
constexpr float kWidestSpread = 16.0F;  ///< variance up to which all of it counts
constexpr float kFarSpread = 8.0F;      ///< 2 sqrt(kWidestSpread)
constexpr float kBinsPerNat = 8.0F;
constexpr float kWideList = 16.0F;  ///< variance from which a row of an unread list may be anything

/// A list's logit for a head, and how far rows may lie above it.
struct ListLogit {
  float logit;   ///< base 2
  float spread;  ///< variance of the rows' logits, nats^2
};
/// score: base 2, before a soft-cap; noise: HeadConstants::noise; spread: ListFigures::spread.
__device__ inline ListLogit logit_of_list(float score, float noise, float spread, float cap) {
  float slope = 1.0F;
  const float logit = cap == 0.0F ? score : capped(score, cap, slope);
  return {logit, 2.0F * kLn2 * noise * slope * slope * spread};
}
/// By how much a list counts, in nats.
__device__ inline float hope_of_list(const ListLogit& list, float log_rows) {
  const float t = list.spread;
  const float above = t <= kWidestSpread ? t : fmaf(kFarSpread, sqrtf(t), -kWidestSpread);
  return fmaf(list.logit, kLn2, above) + log_rows;
}

template <int kDim, int kHeadTiles>
struct ListShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  SharedQueries<kDim, 2, kHeadTiles> queries;
  alignas(16) float q[kHeads][kDim];
  float tops[kListWarps][kHeads], lows[kListWarps][kHeads], logits[kListWarps][kHeads];
  // Of the choice.
  float low[kHeads], span[kHeads];
  uint32_t reach[kHeads];  ///< as rising()
  uint32_t widest;         ///< as the bits of a float
  uint32_t bins[kListBins];
  uint32_t sums[kListWarps];
  uint32_t last_bin;
  uint32_t is_last;
};

/// Extremes of a head's lists: the most and the least that one counts, in nats, and the largest logit of a mean, base 2.
struct ListMaxima {
  float top = kMinusInf, low = -kMinusInf, logit = kMinusInf;

  __device__ void add(const ListMaxima& other) {
    top = fmaxf(top, other.top);
    low = fminf(low, other.low);
    logit = fmaxf(logit, other.logit);
  }
};

/// A list's bin, and its rows.
struct ListBin {
  __device__ static uint32_t pack(uint32_t bin, uint32_t rows) { return bin << 16U | rows; }
  __device__ static uint32_t bin(uint32_t packed) { return packed >> 16U; }
  __device__ static uint32_t rows(uint32_t packed) { return packed & 0xFFFFU; }
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

/// Chooses the lists of a KV head, by the block that was the last to score.
template <int kDim, int kHeadTiles>
__device__ inline void choose_lists(const CodesParams& s, uint32_t kv_head,
                                    ListShared<kDim, kHeadTiles>& shared) {
  constexpr uint32_t kHeads = 4 * kHeadTiles;
  const CodesLists& l = s.lists;
  const uint32_t count = __ldcg(&l.counts[kv_head]);
  const float cap = s.logits.softcap * kLog2E;
  const size_t first = size_t{kv_head} * l.list_capacity;
  const float* const scores = s.list_scores + first * kHeads;
  const ListFigures* const figures = l.figures + first;
  const ListPlace* const places = l.places + first;
  ChosenLists& ends = s.list_ends[kv_head];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // The extremes of all lists: a warp has every eighth head.
  for (uint32_t h = warp; h < kHeads; h += kListWarps) {
    ListMaxima of_head;
    for (uint32_t b = lane; b < l.score_blocks; b += 32) {
      const float* from = s.list_maxima + (size_t{kv_head} * l.score_blocks + b) * 3 * kHeads + h;
      of_head.add({__ldcg(from), __ldcg(from + kHeads), __ldcg(from + 2 * kHeads)});
    }
    of_head = {warp_max(of_head.top), -warp_max(-of_head.low), warp_max(of_head.logit)};
    if (lane == 0) {
      const bool counts = h < s.group;
      shared.low[h] = counts ? fmaxf(of_head.low, of_head.top - kDeepestList) : -kMinusInf;
      shared.span[h] = counts ? of_head.top - shared.low[h] : 0.0F;
      if (counts) ends.tops[h] = of_head.logit;
      shared.reach[h] = 0;
    }
  }
  for (uint32_t i = threadIdx.x; i < kListBins; i += kListThreads) shared.bins[i] = 0;
  if (threadIdx.x == 0) shared.widest = 0;
  __syncthreads();
  float most = 0.0F;
  for (uint32_t h = 0; h < s.group; ++h) most = fmaxf(most, shared.span[h]);

  // Rows by how far their list is below the best. A thread has four lists side by side, then those of the next round.
  constexpr uint32_t kEach = 4, kRound = kEach * kListThreads;
  float widest = 0.0F;
#pragma unroll 1
  for (uint32_t from = threadIdx.x * kEach; from < count; from += kRound) {
    uint32_t bins[kEach];
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      // There is memory for whole fours.
      const uint32_t i = from + e;
      const ListFigures of_list = figures[i];
      float gain = kMinusInf;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const float4 four =
            __ldcg(reinterpret_cast<const float4*>(scores + size_t{i} * kHeads) + t);
        const float of_head[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t h = 4 * t + j;
          if (h >= s.group) continue;
          const ListLogit logit =
              logit_of_list(of_head[j], shared.queries.constants[h].noise, of_list.spread, cap);
          gain = fmaxf(gain, hope_of_list(logit, of_list.log_rows) - shared.low[h]);
        }
      }
      const float step = (most - gain) * kBinsPerNat;
      const uint32_t bin = step < kListBins - 1.0F
                               ? static_cast<uint32_t>(fmaxf(step, 0.0F))
                               : kListBins - 1;  // the last for what is no number
      const uint32_t rows = i < count ? places[i].rows : 0;
      if (i < count) {
        widest = fmaxf(widest, of_list.widest);
        atomicAdd(&shared.bins[bin], rows);
      }
      bins[e] = ListBin::pack(bin, rows);
    }
    *reinterpret_cast<uint4*>(s.list_bins + first + from) = {bins[0], bins[1], bins[2], bins[3]};
  }
  atomicMax(&shared.widest, __float_as_uint(widest));
  __syncthreads();

  // The last bin for all before and in it to have at most so many rows, at least the first that has any.
  static_assert(kListBins == kListThreads, "a thread has a bin");
  const uint32_t listed = __ldcg(l.listed) * kCodeBlock;
  const auto shared_rows = static_cast<uint32_t>(l.share.share * static_cast<float>(listed));
  const uint32_t goal = min(listed, max(shared_rows, l.share.least));
  const uint32_t of_bin = shared.bins[threadIdx.x];
  uint32_t all = 0;
  const uint32_t before = sum_before(of_bin, shared, all);
  if (threadIdx.x == 0) shared.last_bin = kListBins - 1;
  __syncthreads();
  if (before != 0 && before + of_bin > goal) atomicMin(&shared.last_bin, threadIdx.x - 1);
  __syncthreads();
  const uint32_t last = shared.last_bin;

  // The table: the pairs of a thread's four lists come side by side, round by round.
  ListedPair* const table = s.list_pairs + size_t{kv_head} * most_groups(s);
  float reach[kHeads];
#pragma unroll
  for (float& x : reach) x = kMinusInf;
  uint32_t written = 0;
#pragma unroll 1
  for (uint32_t round = 0; round < count; round += kRound) {
    const uint32_t from = round + threadIdx.x * kEach;
    const bool inside = from < count;
    uint4 four = {};
    if (inside) four = *reinterpret_cast<const uint4*>(s.list_bins + first + from);
    const uint32_t bins[kEach] = {four.x, four.y, four.z, four.w};
    uint32_t pairs = 0;
    bool is_read[kEach];
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      const uint32_t rows = ListBin::rows(bins[e]);
      is_read[e] = rows != 0 && ListBin::bin(bins[e]) <= last;
      if (is_read[e]) pairs += (rows + kPairRows - 1) / kPairRows;
    }
    uint32_t at = written + sum_before(pairs, shared, all);
    written += all;
    if (!inside) continue;
    float left[kEach];
#pragma unroll
    for (uint32_t e = 0; e < kEach; ++e) {
      const uint32_t i = from + e, rows = ListBin::rows(bins[e]);
      left[e] = is_read[e] ? 0.0F : static_cast<float>(rows);
      if (rows == 0) continue;
      if (is_read[e]) {
        const uint32_t pair = places[i].first_pair;
        for (uint32_t row = 0; row < rows; row += kPairRows) {
          table[at++] = {pair + row / kPairRows,
                         (min(rows - row, kPairRows) - 1) << ListedPair::kRowsAt | i};
        }
        continue;
      }
      const float longest = figures[i].widest;
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const float4 of_tile =
            __ldcg(reinterpret_cast<const float4*>(scores + size_t{i} * kHeads) + t);
        const float of_head[4] = {of_tile.x, of_tile.y, of_tile.z, of_tile.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float far = doubt_reach(shared.queries.constants[4 * t + j].noise, longest);
          reach[4 * t + j] = fmaxf(reach[4 * t + j], of_head[j] + far);
        }
      }
    }
    *reinterpret_cast<float4*>(s.list_left + first + from) = {left[0], left[1], left[2], left[3]};
  }
#pragma unroll
  for (uint32_t h = 0; h < kHeads; ++h) {
    const float of_warp = warp_max(reach[h]);
    if (lane == 0) atomicMax(&shared.reach[h], rising(of_warp));
  }
  // The blocks that no list has.
  const uint32_t blocks = __ldcg(s.block_count), in_lists = listed / kCodeBlock;
  const uint32_t newer = blocks > in_lists ? (blocks - in_lists) * kBlockMaxima : 0;
  for (uint32_t i = threadIdx.x; i < newer; i += kListThreads) {
    const uint32_t pair = in_lists * kBlockMaxima + i;
    table[written + i] = {
        pair, ListedPair::kOfBlock | (kPairRows - 1) << ListedPair::kRowsAt | pair / kBlockMaxima};
  }
  __syncthreads();
  if (threadIdx.x < s.group)
    ends.reach[threadIdx.x] = weight_of(uint64_t{shared.reach[threadIdx.x]} << 32U);
  if (threadIdx.x != 0) return;
  float largest = 0.0F;
  for (uint32_t h = 0; h < s.group; ++h)
    largest = fmaxf(largest, shared.queries.constants[h].noise);
  ends.is_wide = 2.0F * kLn2 * largest * __uint_as_float(shared.widest) > kWideList ? 1 : 0;
  ends.pairs = written + newer;
}

/// Grid (score_blocks, KV heads).
template <int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ CodesParams s) {
  constexpr uint32_t kHeads = 4 * kHeadTiles;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ListShared<kDim, kHeadTiles>*>(memory);
  const CodesLists& l = s.lists;
  const uint32_t kv_head = blockIdx.y, warp = threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  wait_for_kernels_before();
  let_next_kernel_start();
  const StepHeads heads{s, 0, kHeads};
  RawQueries<kDim, kHeads, kListWarps> raw;
  raw.load(heads, kv_head);
  const uint32_t count = __ldcg(&l.counts[kv_head]);
  shared.queries.prepare(heads, raw, shared.q);
  __syncthreads();

  const float cap = s.logits.softcap * kLog2E;
  const size_t first = size_t{kv_head} * l.list_capacity;
  const auto* const means = reinterpret_cast<const __half*>(l.key_means) + first * kDim;
  const uint32_t warps = gridDim.x * kListWarps, number = blockIdx.x * kListWarps + warp;
  ListMaxima own[kHeadTiles];
  constexpr uint32_t kAtOnce = kHeadTiles == 1 ? 4 : 2;
  for (uint32_t i = number; i < count; i += warps * kAtOnce) {
    float score[kAtOnce][kHeadTiles];
#pragma unroll
    for (uint32_t a = 0; a < kAtOnce; ++a) {
      const uint32_t list = min(i + a * warps, count - 1);
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        score[a][t] =
            mean_logit<kDim>(&shared.queries.rows[4 * t], means + size_t{list} * kDim, lane);
      }
    }
#pragma unroll
    for (uint32_t a = 0; a < kAtOnce; ++a) {
      const uint32_t list = i + a * warps;
      if (list >= count) break;
      const ListFigures figures = l.figures[first + list];
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        const int h = 4 * t + lane % 4;
        if (lane < 4) s.list_scores[(first + list) * kHeads + h] = score[a][t];
        const ListLogit logit =
            logit_of_list(score[a][t], shared.queries.constants[h].noise, figures.spread, cap);
        const float hope = hope_of_list(logit, figures.log_rows);
        own[t].add({hope, hope, logit.logit});
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    if (lane >= 4) continue;
    shared.tops[warp][4 * t + lane] = own[t].top;
    shared.lows[warp][4 * t + lane] = own[t].low;
    shared.logits[warp][4 * t + lane] = own[t].logit;
  }
  __syncthreads();
  if (threadIdx.x < kHeads) {
    ListMaxima of_block;
    for (uint32_t w = 0; w < kListWarps; ++w) {
      of_block.add({shared.tops[w][threadIdx.x], shared.lows[w][threadIdx.x],
                    shared.logits[w][threadIdx.x]});
    }
    float* to =
        s.list_maxima + (size_t{kv_head} * l.score_blocks + blockIdx.x) * 3 * kHeads + threadIdx.x;
    to[0] = of_block.top, to[kHeads] = of_block.low, to[2 * kHeads] = of_block.logit;
  }
  // The last block to arrive sees what all others have written.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.is_last = atomicAdd(&l.arrivals[kv_head], 1U) + 1 == gridDim.x ? 1 : 0;
    if (shared.is_last != 0) l.arrivals[kv_head] = 0;
    __threadfence();
  }
  __syncthreads();
  if (shared.is_last != 0) choose_lists(s, kv_head, shared);
}

}  // namespace keyhole::gpu::codes
