// The choice of the lists that a step reads, by the rule of index/scan/list_choice.h: lists in the order of ln n + s + t, each
// by the head for which it stands out most above that head's lightest list, until a share of the rows is read.
//
// A cluster of 8 thread blocks has a KV head, each block an eighth of its lists in their order:
//
//   score    products of the queries with the mean keys, on tensor cores: means in fp16, queries as the sum of two fp16
//            numbers (22 bits). The first means are asked for before the kernels before this one have ended
//   extremes of each head, by all blocks for all
//   bins     of an eighth of a nat: rows and pairs of tiles by how far their list is below the best
//   table    of the pairs of tiles that the pass reads: those of the chosen lists, list by list, then those of the blocks that
//            no list has. From the bins of all blocks each knows where its part begins
//   weights  of the lists that are not read, which the pass attends by their means
//
// The kernel is a chain of latencies, which two barriers of the cluster divide.
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/candidates.cuh"
#include "gpu/cuda/codes/cluster.cuh"
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
/// The weight of an unread list's row on average, relative to the head's largest mean logit. top: that logit, base 2.
__device__ inline float weight_of_list(const ListLogit& list, float log_rows, float top) {
  const float above = list.logit - top;
  // Many of a list's rows make up the weight by second order, up to a variance of twice the logarithm of their number; from
  // there on the largest row alone does.
  const float nats = list.spread <= 2.0F * log_rows
                         ? 0.5F * list.spread
                         : sqrtf(2.0F * list.spread * log_rows) - log_rows;
  return exp2_fast(fminf(fmaf(nats, kLog2E, above), 0.0F));
}

/// The queries of a group as two fp16 numbers, high and low, relative to a power of 2 of each head. Rows are longer than their
/// contents, so that lanes read from different banks.
template <int kDim, int kHeadTiles>
struct SplitQueries {
  static constexpr int kHeads = 4 * kHeadTiles;
  static constexpr int kColumns = (kHeads + 7) / 8;  ///< of 8 heads
  static constexpr int kRow = kDim + 16;
  alignas(16) __half parts[2][8 * kColumns][kRow];
  float unit[8 * kColumns];  ///< what products are multiplied by

  /// Makes them from the rows of prepared queries, by the threads of a block; barriers before and after are the caller's.
  template <class Queries>
  __device__ void make(const Queries& queries) {
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

/// The part of 16 mean keys that a lane holds: of lists lane / 4 and lane / 4 + 8, components 16 m + 4 (lane % 4) .. + 3.
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

/// Numbers of which the cluster needs the largest: of each head the most that a list counts and minus the least, in nats, and
/// the largest logit of a mean, base 2; and the longest row of all lists.
template <int kHeads>
struct ListExtremes {
  static constexpr uint32_t kNumbers = 3 * kHeads + 1;
  static constexpr uint32_t kTop = 0, kLow = kHeads, kLogit = 2 * kHeads, kWidest = 3 * kHeads;
};

template <int kDim, int kHeadTiles>
struct ListShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  static constexpr uint32_t kNumbers = ListExtremes<kHeads>::kNumbers;
  SharedQueries<kDim, 2, kHeadTiles> queries;
  alignas(16) float q[kHeads][kDim];
  SplitQueries<kDim, kHeadTiles> split;
  alignas(16) float scores[kListThreads][kHeads];  ///< of the block's first lists
  alignas(16) uint2 bins[kListBins];               ///< rows and pairs of the block's lists
  uint32_t warp_ends[kListWarps][kNumbers];        ///< as rising()
  uint32_t block_ends[kListBlocks][kNumbers];      ///< from all blocks of the cluster
  float ends[kNumbers];
  uint32_t reach[kHeads];  ///< as rising(), of the lists of this block that are not read
  uint32_t sums[kListWarps], pairs_before[kListWarps], pairs_of_all[kListWarps];
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

/// The choice for a KV head, by a cluster of kListBlocks blocks.
template <int kDim, int kHeadTiles>
class ListChooser {
 public:
  static constexpr uint32_t kHeads = 4 * kHeadTiles;
  using Shared = ListShared<kDim, kHeadTiles>;
  using Ends = ListExtremes<kHeads>;

  __device__ ListChooser(const CodesParams& s, Shared& shared)
      : s_(s),
        shared_(shared),
        kv_head_(blockIdx.x / kListBlocks),
        rank_(blockIdx.x % kListBlocks),
        cap_(s.logits.softcap * kLog2E) {}

  __device__ void run() {
    cluster_arrive_relaxed();  // waited for before the first write to another block
    const CodesLists& l = s_.lists;
    const uint32_t warp = threadIdx.x / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Lists are older than the kernel before this one: the call that makes them ends with a kernel.
    count_ = __ldcg(&l.counts[kv_head_]);
    first_ = size_t{kv_head_} * l.list_capacity;
    constexpr uint32_t kTile = 16;
    const uint32_t share = (count_ + kTile * kListBlocks - 1) / (kTile * kListBlocks) * kTile;
    begin_ = min(rank_ * share, count_), end_ = min(begin_ + share, count_);
    const auto* const means = reinterpret_cast<const __half*>(l.key_means) + first_ * kDim;
    const uint32_t of_lane = begin_ + warp * kTile + lane / 4;
    MeanRows<kDim> rows;
    if (begin_ < end_) {
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) rows.load(means, of_lane, count_, m, lane);
    }
    const uint32_t own = begin_ + threadIdx.x;
    if (own < end_) own_figures_ = l.figures[first_ + own], own_place_ = l.places[first_ + own];
    for (uint32_t i = threadIdx.x; i < kListBins; i += kListThreads) shared_.bins[i] = {0, 0};
    if (threadIdx.x < kHeads) shared_.reach[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared_.last_bin = kListBins - 1;
    wait_for_kernels_before();
    let_next_kernel_start();
    const StepHeads heads{s_, 0, kHeads};
    RawQueries<kDim, kHeads, kListWarps> raw;
    raw.load(heads, kv_head_);
    listed_ = __ldcg(l.listed) * kCodeBlock;
    blocks_ = __ldcg(s_.block_count);
    shared_.queries.prepare(heads, raw, shared_.q);
    __syncthreads();
    shared_.split.make(shared_.queries);
    __syncthreads();
    for (uint32_t tile = begin_ + warp * kTile; tile < end_; tile += kListWarps * kTile) {
      score(rows, means, tile, lane);
    }
    __syncthreads();
    find_extremes();
    const uint32_t own_bin = fill_bins();
    uint32_t written = 0, pairs = 0;
    const uint32_t last = find_last_bin(written, pairs);
    write_table(own_bin, last, written, pairs);
    cluster_wait();  // no block reads bins any more
  }

 private:
  /// The scores of a tile of 16 lists, by a warp; loads the rows of its next one.
  __device__ void score(MeanRows<kDim>& rows, const __half* means, uint32_t tile, int lane) {
    constexpr int kColumns = SplitQueries<kDim, kHeadTiles>::kColumns;
    const uint32_t next = tile + kListWarps * 16;
    float sums[kColumns][4] = {};
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
      const uint32_t a[4] = {rows.of[0][m].x, rows.of[1][m].x, rows.of[0][m].y, rows.of[1][m].y};
      if (next < end_) rows.load(means, next + lane / 4, count_, m, lane);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const uint2 b = *reinterpret_cast<const uint2*>(
              &shared_.split.parts[part][8 * c + lane / 4][16 * m + lane % 4 * 4]);
          multiply_add<__half>(sums[c], a, b.x, b.y);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint32_t h = 8 * c + lane % 4 * 2;
      if (h >= kHeads) continue;
      const float2 unit = *reinterpret_cast<const float2*>(&shared_.split.unit[h]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t list = tile + lane / 4 + 8 * r;
        if (list >= end_) continue;
        const float2 two = {sums[c][2 * r] * unit.x, sums[c][2 * r + 1] * unit.y};
        *reinterpret_cast<float2*>(s_.list_scores + (first_ + list) * kHeads + h) = two;
        if (list - begin_ < kListThreads) {
          *reinterpret_cast<float2*>(&shared_.scores[list - begin_][h]) = two;
        }
      }
    }
  }

  /// A list as a thread has it. i: its number, begin_ + threadIdx.x in the first round.
  struct List {
    float scores[kHeads];
    ListFigures figures;
    ListPlace place;
  };
  __device__ List list_of(uint32_t i) const {
    List list;
    const bool is_own = i - begin_ < kListThreads;
    const float* const from =
        is_own ? shared_.scores[i - begin_] : s_.list_scores + (first_ + i) * kHeads;
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
      const float4 four = *reinterpret_cast<const float4*>(from + 4 * t);
      list.scores[4 * t] = four.x, list.scores[4 * t + 1] = four.y;
      list.scores[4 * t + 2] = four.z, list.scores[4 * t + 3] = four.w;
    }
    list.figures = is_own ? own_figures_ : s_.lists.figures[first_ + i];
    list.place = is_own ? own_place_ : s_.lists.places[first_ + i];
    return list;
  }
  [[nodiscard]] __device__ ListLogit logit_of(const List& list, uint32_t h) const {
    return logit_of_list(list.scores[h], shared_.queries.constants[h].noise, list.figures.spread,
                         cap_);
  }

  /// Leaves the extremes of all lists of the KV head in shared.ends.
  __device__ void find_extremes() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float most[Ends::kNumbers];
#pragma unroll
    for (float& x : most) x = kMinusInf;
#pragma unroll 1
    for (uint32_t i = begin_ + threadIdx.x; i < end_; i += kListThreads) {
      const List list = list_of(i);
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        const ListLogit logit = logit_of(list, h);
        const float hope = hope_of_list(logit, list.figures.log_rows);
        most[Ends::kTop + h] = fmaxf(most[Ends::kTop + h], hope);
        most[Ends::kLow + h] = fmaxf(most[Ends::kLow + h], -hope);
        most[Ends::kLogit + h] = fmaxf(most[Ends::kLogit + h], logit.logit);
      }
      most[Ends::kWidest] = fmaxf(most[Ends::kWidest], list.figures.widest);
    }
#pragma unroll
    for (uint32_t n = 0; n < Ends::kNumbers; ++n) {
      const uint32_t of_warp = __reduce_max_sync(kWholeWarp, rising(most[n]));
      if (lane == n % 32) shared_.warp_ends[warp][n] = of_warp;
    }
    __syncthreads();
    cluster_wait();  // all blocks have started
    if (threadIdx.x < Ends::kNumbers) {
      uint32_t of_block = 0;
#pragma unroll
      for (uint32_t w = 0; w < kListWarps; ++w) {
        of_block = max(of_block, shared_.warp_ends[w][threadIdx.x]);
      }
#pragma unroll
      for (uint32_t b = 0; b < kListBlocks; ++b) {
        *in_block(&shared_.block_ends[rank_][threadIdx.x], b) = of_block;
      }
    }
    cluster_barrier();
    if (threadIdx.x < Ends::kNumbers) {
      uint32_t of_all = 0;
#pragma unroll
      for (uint32_t b = 0; b < kListBlocks; ++b) {
        of_all = max(of_all, shared_.block_ends[b][threadIdx.x]);
      }
      shared_.ends[threadIdx.x] = weight_of(uint64_t{of_all} << 32U);
    }
    __syncthreads();
  }
  [[nodiscard]] __device__ float low_of(uint32_t h) const {
    return fmaxf(-shared_.ends[Ends::kLow + h], shared_.ends[Ends::kTop + h] - kDeepestList);
  }

  /// Fills the bins; returns that of the thread's first list, and leaves those of others in list_bins.
  __device__ uint32_t fill_bins() {
    float most = 0.0F, lows[kHeads];
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h) {
      lows[h] = low_of(h);
      if (h < s_.group) most = fmaxf(most, shared_.ends[Ends::kTop + h] - lows[h]);
    }
    uint32_t first_bin = 0;
#pragma unroll 1
    for (uint32_t i = begin_ + threadIdx.x; i < end_; i += kListThreads) {
      const List list = list_of(i);
      float gain = kMinusInf;
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        if (h >= s_.group) continue;
        gain = fmaxf(gain, hope_of_list(logit_of(list, h), list.figures.log_rows) - lows[h]);
      }
      const float step = (most - gain) * kBinsPerNat;
      const uint32_t bin = step < kListBins - 1.0F
                               ? static_cast<uint32_t>(fmaxf(step, 0.0F))
                               : kListBins - 1;  // the last for what is no number
      atomicAdd(&shared_.bins[bin].x, list.place.rows);
      atomicAdd(&shared_.bins[bin].y, pairs_of_list(list.place));
      if (i - begin_ < kListThreads) {
        first_bin = bin;
      } else {
        s_.list_bins[first_ + i] = bin;
      }
    }
    cluster_barrier();
    return first_bin;
  }
  [[nodiscard]] __device__ static uint32_t pairs_of_list(const ListPlace& place) {
    return (place.rows + kPairRows - 1) / kPairRows;
  }

  /// The last bin for all before and in it to have at most so many rows, at least the first that has any. written: gets the
  /// pairs of the blocks before this one that are read, pairs: of all blocks.
  __device__ uint32_t find_last_bin(uint32_t& written, uint32_t& pairs) {
    static_assert(kListBins == 2 * kListThreads, "a thread has two bins");
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, bin = 2 * threadIdx.x;
    uint32_t rows[2] = {}, before[2] = {}, of_all[2] = {};
#pragma unroll
    for (uint32_t b = 0; b < kListBlocks; ++b) {
      const uint4 two = *reinterpret_cast<const uint4*>(in_block(&shared_.bins[bin], b));
      rows[0] += two.x, rows[1] += two.z;
      of_all[0] += two.y, of_all[1] += two.w;
      if (b < rank_) before[0] += two.y, before[1] += two.w;
    }
    cluster_arrive();
    const auto of_share = static_cast<uint32_t>(s_.lists.share.share * static_cast<float>(listed_));
    const uint32_t goal = min(listed_, max(of_share, s_.lists.share.least));
    uint32_t all = 0;
    const uint32_t sum = sum_before(rows[0] + rows[1], shared_, all);
    if (sum != 0 && sum + rows[0] > goal) {
      atomicMin(&shared_.last_bin, bin - 1);
    } else if (sum + rows[0] != 0 && sum + rows[0] + rows[1] > goal) {
      atomicMin(&shared_.last_bin, bin);
    }
    __syncthreads();
    const uint32_t last = shared_.last_bin;
    const uint32_t own_before = (bin <= last ? before[0] : 0) + (bin < last ? before[1] : 0);
    const uint32_t own_all = (bin <= last ? of_all[0] : 0) + (bin < last ? of_all[1] : 0);
    const uint32_t warp_before = __reduce_add_sync(kWholeWarp, own_before);
    const uint32_t warp_all = __reduce_add_sync(kWholeWarp, own_all);
    if (lane == 0) {
      shared_.pairs_before[warp] = warp_before;
      shared_.pairs_of_all[warp] = warp_all;
    }
    __syncthreads();
    written = pairs = 0;
#pragma unroll
    for (uint32_t w = 0; w < kListWarps; ++w) {
      written += shared_.pairs_before[w];
      pairs += shared_.pairs_of_all[w];
    }
    return last;
  }

  /// Writes what the pass and the kernel behind it need. own_bin: of the thread's first list; written: pairs of the blocks
  /// before this one; pairs: of all blocks.
  __device__ void write_table(uint32_t own_bin, uint32_t last, uint32_t written, uint32_t pairs) {
    const uint32_t lane = threadIdx.x % 32;
    ListedPair* const table = s_.list_pairs + size_t{kv_head_} * most_groups(s_);
    ChosenLists& ends = s_.list_ends[kv_head_];
    // The blocks that no list has.
    const uint32_t in_lists = listed_ / kCodeBlock;
    const uint32_t newer = blocks_ > in_lists ? (blocks_ - in_lists) * kBlockMaxima : 0;
    for (uint32_t i = rank_ * kListThreads + threadIdx.x; i < newer;
         i += kListBlocks * kListThreads) {
      const uint32_t pair = in_lists * kBlockMaxima + i;
      table[pairs + i] = {pair, ListedPair::kOfBlock | (kPairRows - 1) << ListedPair::kRowsAt |
                                    pair / kBlockMaxima};
    }
    if (rank_ == 0 && threadIdx.x < s_.group) {
      ends.tops[threadIdx.x] = shared_.ends[Ends::kLogit + threadIdx.x];
    }
    if (rank_ == 0 && threadIdx.x == 0) {
      float largest = 0.0F;
      for (uint32_t h = 0; h < s_.group; ++h) {
        largest = fmaxf(largest, shared_.queries.constants[h].noise);
      }
      const float widest = fmaxf(shared_.ends[Ends::kWidest], 0.0F);
      ends.is_wide = 2.0F * kLn2 * largest * widest > kWideList ? 1 : 0;
      ends.pairs = pairs + newer;
    }
    float reach[kHeads];
#pragma unroll
    for (float& x : reach) x = kMinusInf;
#pragma unroll 1
    for (uint32_t round = begin_; round < end_; round += kListThreads) {
      const uint32_t i = round + threadIdx.x;
      uint32_t bin = own_bin;
      List list{};
      if (i < end_) {
        list = list_of(i);
        if (round != begin_) bin = s_.list_bins[first_ + i];
      }
      const bool is_read = i < end_ && bin <= last;
      uint32_t all = 0;
      uint32_t at = written + sum_before(is_read ? pairs_of_list(list.place) : 0, shared_, all);
      written += all;
      if (i >= end_) continue;
      const uint32_t n = list.place.rows;
      float weights[kHeads];
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        const float weight = weight_of_list(logit_of(list, h), list.figures.log_rows,
                                            shared_.ends[Ends::kLogit + h]);
        weights[h] = is_read ? 0.0F : weight * static_cast<float>(n);
        if (is_read) continue;
        const float far = doubt_reach(shared_.queries.constants[h].noise, list.figures.widest);
        reach[h] = fmaxf(reach[h], list.scores[h] + far);
      }
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) {
        reinterpret_cast<float4*>(s_.list_weights + (first_ + i) * kHeads)[t] = {
            weights[4 * t], weights[4 * t + 1], weights[4 * t + 2], weights[4 * t + 3]};
      }
      if (!is_read) continue;
      for (uint32_t row = 0; row < n; row += kPairRows) {
        table[at++] = {list.place.first_pair + row / kPairRows,
                       (min(n - row, kPairRows) - 1) << ListedPair::kRowsAt | i};
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kHeads; ++h) {
      const uint32_t of_warp = __reduce_max_sync(kWholeWarp, rising(reach[h]));
      if (lane == 0) atomicMax(&shared_.reach[h], of_warp);
    }
    __syncthreads();
    if (threadIdx.x < s_.group) {
      ends.reach[rank_][threadIdx.x] = weight_of(uint64_t{shared_.reach[threadIdx.x]} << 32U);
    }
  }

  const CodesParams& s_;
  Shared& shared_;
  const uint32_t kv_head_, rank_;
  const float cap_;
  uint32_t count_ = 0, begin_ = 0, end_ = 0;  ///< lists of the KV head; those of the block
  size_t first_ = 0;                          ///< the KV head's first list among those of all
  uint32_t listed_ = 0, blocks_ = 0;
  ListFigures own_figures_;
  ListPlace own_place_;
};

/// Grid (kListBlocks * KV heads), in clusters of kListBlocks.
template <int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ CodesParams s) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char memory[];
  ListChooser<kDim, kHeadTiles>(s, *reinterpret_cast<ListShared<kDim, kHeadTiles>*>(memory)).run();
#endif
}

}  // namespace keyhole::gpu::codes
