// The choice of the lists that a step reads, by the rule of index/scan/list_choice.h: lists in the order of ln n + s + t, each
// by the head for which it stands out most above that head's lightest list, until a share of the rows is read. Heads that
// look at everything read no more here (ListGoal::miss is of the host).
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
// The kernel is a chain of latencies, which two barriers of the cluster divide: behind extremes and bins.
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/candidates.cuh"
#include "gpu/cuda/codes/cluster.cuh"
#include "gpu/cuda/codes/doubt.cuh"
#include "gpu/cuda/common/async_copy.cuh"
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

/// The first lists of a block in shared memory, behind ListShared: what all stages need of them, so that these wait for memory
/// once, in front of all.
template <int kHeads>
struct KeptLists {
  static constexpr size_t kBytes =
      kHeads * sizeof(float) + sizeof(ListFigures) + sizeof(ListPlace) + sizeof(uint16_t);

  uint32_t count;        ///< that there is memory for, a multiple of kListTile
  float* scores;         ///< `[count, kHeads]`
  ListFigures* figures;  ///< `[count]`
  ListPlace* places;
  uint16_t* bins;

  __device__ KeptLists(unsigned char* memory, uint32_t count)
      : count(count),
        scores(reinterpret_cast<float*>(memory)),
        figures(reinterpret_cast<ListFigures*>(scores + count * kHeads)),
        places(reinterpret_cast<ListPlace*>(figures + count)),
        bins(reinterpret_cast<uint16_t*>(places + count)) {}
};
static_assert(sizeof(ListFigures) == 16 && sizeof(ListPlace) == 8 && kListBins <= 1U << 16U);

template <int kDim, int kHeadTiles>
struct ListShared {
  static constexpr int kHeads = 4 * kHeadTiles;
  static constexpr uint32_t kNumbers = ListExtremes<kHeads>::kNumbers;
  SharedQueries<kDim, 2, kHeadTiles> queries;
  alignas(16) float q[kHeads][kDim];
  SplitQueries<kDim, kHeadTiles> split;
  alignas(16) uint2 bins[kListBins];  ///< rows and pairs of the block's lists
  float warp_ends[kListWarps][kNumbers];
  float block_ends[kListBlocks][kNumbers];  ///< from all blocks of the cluster
  float ends[kNumbers];
  float warp_reach[kListWarps][kHeads];  ///< of lists that are not read
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

/// The choice for a KV head, by a cluster of kListBlocks blocks. Where heads count, kHeads neighbouring threads have a list, each one
/// head of it: code that runs once is slow, because its instructions come from memory, and so there is one copy of it and not kHeads.
template <int kDim, int kHeadTiles>
class ListChooser {
 public:
  static constexpr uint32_t kHeads = 4 * kHeadTiles;
  using Shared = ListShared<kDim, kHeadTiles>;
  using Ends = ListExtremes<kHeads>;

  /// memory: Shared, and behind it the lists that are kept.
  __device__ ListChooser(const CodesParams& s, unsigned char* memory)
      : s_(s),
        shared_(*reinterpret_cast<Shared*>(memory)),
        kept_(memory + sizeof(Shared), s.lists.kept),
        kv_head_(blockIdx.x / kListBlocks),
        rank_(blockIdx.x % kListBlocks),
        head_(threadIdx.x % kHeads),
        cap_(s.logits.softcap * kLog2E) {}

  __device__ void run() {
    cluster_arrive_relaxed();  // waited for before the first write to another block
    const CodesLists& l = s_.lists;
    const uint32_t warp = threadIdx.x / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Lists are older than the kernel before this one: the call that makes them ends with a kernel.
    const uint32_t count = __ldcg(&l.counts[kv_head_]);
    const uint32_t share =
        (count + kListTile * kListBlocks - 1) / (kListTile * kListBlocks) * kListTile;
    const uint32_t begin = min(rank_ * share, count);
    count_ = min(begin + share, count) - begin;
    begin_ = begin;
    first_ = size_t{kv_head_} * l.list_capacity + begin;
    const auto* const means = reinterpret_cast<const __half*>(l.key_means) + first_ * kDim;
    MeanRows<kDim> rows;
    if (warp * kListTile < count_) {
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m)
        rows.load(means, warp * kListTile + lane / 4, count_, m, lane);
    }
    prefetch_means(means);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < min(count_, kept_.count); i += kListThreads) {
      kept_.figures[i] = l.figures[first_ + i];
      kept_.places[i] = l.places[first_ + i];
    }
    for (uint32_t i = threadIdx.x; i < kListBins; i += kListThreads) shared_.bins[i] = {0, 0};
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
    noise_ = shared_.queries.constants[head_].noise;
    __syncthreads();
#pragma unroll 1
    for (uint32_t tile = warp * kListTile; tile < count_; tile += kListWarps * kListTile) {
      score(rows, means, tile, lane);
    }
    __syncthreads();
    find_extremes();
    fill_bins();
    uint32_t written = 0, pairs = 0;
    const uint32_t last = find_last_bin(written, pairs);
    prefetch_codes(last);
    cluster_arrive();
    write_table(last, written, pairs);
    weigh_others(last);
    cluster_wait();  // no block reads bins any more
  }

 private:
  static constexpr uint32_t kAtOnce =
      kListThreads / kHeads;  ///< lists that the block has at once, by head

  /// Brings mean keys on their way to the L2 cache while the kernels before this one still run, behind those that warps ask for at
  /// once: up to 32 MB in all, for there are contexts whose means no cache holds. A block with few tiles gains nothing by it.
  __device__ void prefetch_means(const __half* means) const {
    constexpr uint32_t kMostTiles = 128, kFewTiles = 64;
    const uint32_t list = threadIdx.x * kListTile;
    if (count_ <= kFewTiles * kListTile || list >= count_) return;
    if (threadIdx.x < kListWarps || threadIdx.x >= kMostTiles) return;
    prefetch_bulk(means + size_t{list} * kDim, min(kListTile, count_ - list) * kDim * 2);
  }
  /// Brings the codes of the first lists that are read on their way to the L2 cache: the pass can ask for them when it has seen
  /// the table. Of 128k tokens these are all lists.
  __device__ void prefetch_codes(uint32_t last) const {
    const uint32_t i = threadIdx.x;
    if (i >= count_ || bin_of(i) > last) return;
    const ListPlace place = place_of(i);
    const uint32_t bytes =
        2 * kCodeLanes * 4 * (s_.shape.key_words() + s_.shape.value_words()) + kPairRows * 4;
    const size_t pair = size_t{kv_head_} * s_.lists.pair_capacity + place.first_pair;
    prefetch_bulk(s_.lists.pairs + pair * bytes, pairs_of_list(place) * bytes);
  }

  /// The scores of a tile of 16 lists, by a warp; loads the rows of its next one.
  __device__ void score(MeanRows<kDim>& rows, const __half* means, uint32_t tile, int lane) {
    constexpr int kColumns = SplitQueries<kDim, kHeadTiles>::kColumns;
    const uint32_t next = tile + kListWarps * kListTile;
    float sums[kColumns][4] = {};
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
      const uint32_t a[4] = {rows.of[0][m].x, rows.of[1][m].x, rows.of[0][m].y, rows.of[1][m].y};
      if (next < count_) rows.load(means, next + lane / 4, count_, m, lane);
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
        if (list >= count_) continue;
        const float2 two = {sums[c][2 * r] * unit.x, sums[c][2 * r + 1] * unit.y};
        *reinterpret_cast<float2*>(s_.list_scores + (first_ + list) * kHeads + h) = two;
        if (is_kept(list)) *reinterpret_cast<float2*>(kept_.scores + list * kHeads + h) = two;
      }
    }
  }

  // i: a list's number among those of the block.
  [[nodiscard]] __device__ bool is_kept(uint32_t i) const { return i < kept_.count; }
  [[nodiscard]] __device__ ListPlace place_of(uint32_t i) const {
    return is_kept(i) ? kept_.places[i] : s_.lists.places[first_ + i];
  }
  [[nodiscard]] __device__ uint32_t bin_of(uint32_t i) const {
    return is_kept(i) ? kept_.bins[i] : s_.list_bins[first_ + i];
  }
  [[nodiscard]] __device__ static uint32_t pairs_of_list(const ListPlace& place) {
    return (place.rows + kPairRows - 1) / kPairRows;
  }
  /// A list for the thread's head.
  struct List {
    ListFigures figures;
    ListLogit logit;
    float score;
  };
  [[nodiscard]] __device__ List list_of(uint32_t i) const {
    List list;
    const bool kept = is_kept(i);
    list.score =
        kept ? kept_.scores[i * kHeads + head_] : s_.list_scores[(first_ + i) * kHeads + head_];
    list.figures = kept ? kept_.figures[i] : s_.lists.figures[first_ + i];
    list.logit = logit_of_list(list.score, noise_, list.figures.spread, cap_);
    return list;
  }
  [[nodiscard]] __device__ static float hope_of(const List& list) {
    return hope_of_list(list.logit, list.figures.log_rows);
  }
  /// What the rows of a list weigh together, relative to the head's largest mean logit.
  [[nodiscard]] __device__ float weight_of(const List& list, uint32_t rows) const {
    return static_cast<float>(rows) *
           weight_of_list(list.logit, list.figures.log_rows, shared_.ends[Ends::kLogit + head_]);
  }
  /// Calls visit(i, whether there is such a list) for all lists of the block, by whole warps.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll 1
    for (uint32_t from = 0; from < count_; from += kAtOnce) {
      const uint32_t i = from + threadIdx.x / kHeads;
      visit(min(i, count_ - 1), i < count_);
    }
  }
  /// Over the lanes of a warp with the same head.
  [[nodiscard]] __device__ static float largest_of_head(float x) {
#pragma unroll
    for (uint32_t step = kHeads; step < 32; step *= 2) {
      x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
    }
    return x;
  }
  /// The largest over the lanes with the same list.
  [[nodiscard]] __device__ static float largest_of_list(float x) {
#pragma unroll
    for (uint32_t step = 1; step < kHeads; step *= 2) {
      x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
    }
    return x;
  }

  /// Leaves the extremes of all lists of the KV head in shared.ends.
  __device__ void find_extremes() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float top = kMinusInf, low = kMinusInf, logit = kMinusInf, widest = kMinusInf;
    for_each([&](uint32_t i, bool) {
      const List list = list_of(i);
      const float hope = hope_of(list);
      top = fmaxf(top, hope);
      low = fmaxf(low, -hope);
      logit = fmaxf(logit, list.logit.logit);
      widest = fmaxf(widest, list.figures.widest);
    });
    float* const ends = shared_.warp_ends[warp];
    top = largest_of_head(top), low = largest_of_head(low), logit = largest_of_head(logit);
    widest = largest_of_head(widest);
    if (lane < kHeads) {
      ends[Ends::kTop + lane] = top;
      ends[Ends::kLow + lane] = low;
      ends[Ends::kLogit + lane] = logit;
      if (lane == 0) ends[Ends::kWidest] = widest;
    }
    __syncthreads();
    cluster_wait();  // all blocks have started
    if (threadIdx.x < Ends::kNumbers) {
      float of_block = kMinusInf;
#pragma unroll
      for (uint32_t w = 0; w < kListWarps; ++w) {
        of_block = fmaxf(of_block, shared_.warp_ends[w][threadIdx.x]);
      }
#pragma unroll
      for (uint32_t b = 0; b < kListBlocks; ++b) {
        *in_block(&shared_.block_ends[rank_][threadIdx.x], b) = of_block;
      }
    }
    cluster_barrier();
    if (threadIdx.x < Ends::kNumbers) {
      float of_all = kMinusInf;
#pragma unroll
      for (uint32_t b = 0; b < kListBlocks; ++b) {
        of_all = fmaxf(of_all, shared_.block_ends[b][threadIdx.x]);
      }
      shared_.ends[threadIdx.x] = of_all;
    }
    __syncthreads();
  }

  /// Fills the bins, and notes that of each list.
  __device__ void fill_bins() {
    const float top = shared_.ends[Ends::kTop + head_];
    const float low = fmaxf(-shared_.ends[Ends::kLow + head_], top - kDeepestList);
    const bool counts = head_ < s_.group;
    const float most = largest_of_list(counts ? top - low : 0.0F);
    for_each([&](uint32_t i, bool is_one) {
      const float gain = largest_of_list(counts ? hope_of(list_of(i)) - low : kMinusInf);
      if (!is_one || head_ != 0) return;
      const float step = (most - gain) * kBinsPerNat;
      const uint32_t bin = step < kListBins - 1.0F
                               ? static_cast<uint32_t>(fmaxf(step, 0.0F))
                               : kListBins - 1;  // the last for what is no number
      const ListPlace place = place_of(i);
      atomicAdd(&shared_.bins[bin].x, place.rows);
      atomicAdd(&shared_.bins[bin].y, pairs_of_list(place));
      if (is_kept(i)) {
        kept_.bins[i] = static_cast<uint16_t>(bin);
      } else {
        s_.list_bins[first_ + i] = bin;
      }
    });
    cluster_barrier();
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

  /// Writes the block's part of the table, and what the cluster has come to. written: pairs of the blocks before this one; pairs:
  /// of all blocks.
  __device__ void write_table(uint32_t last, uint32_t written, uint32_t pairs) {
    ListedPair* const table = s_.list_pairs + size_t{kv_head_} * most_groups(s_);
    ChosenLists& ends = s_.list_ends[kv_head_];
#pragma unroll 1
    for (uint32_t from = 0; from < count_; from += kListThreads) {
      const uint32_t i = from + threadIdx.x;
      ListPlace place{};
      if (i < count_ && bin_of(i) <= last) place = place_of(i);
      uint32_t all = 0;
      uint32_t at = written + sum_before(pairs_of_list(place), shared_, all);
      written += all;
#pragma unroll 1
      for (uint32_t row = 0; row < place.rows; row += kPairRows) {
        table[at++] = {
            place.first_pair + row / kPairRows,
            (min(place.rows - row, kPairRows) - 1) << ListedPair::kRowsAt | (begin_ + i)};
      }
    }
    // The blocks that no list has.
    const uint32_t in_lists = listed_ / kCodeBlock;
    const uint32_t newer = blocks_ > in_lists ? (blocks_ - in_lists) * kBlockMaxima : 0;
#pragma unroll 1
    for (uint32_t i = rank_ * kListThreads + threadIdx.x; i < newer;
         i += kListBlocks * kListThreads) {
      const uint32_t pair = in_lists * kBlockMaxima + i;
      table[pairs + i] = {pair, ListedPair::kOfBlock | (kPairRows - 1) << ListedPair::kRowsAt |
                                    pair / kBlockMaxima};
    }
    if (rank_ != 0) return;
    if (threadIdx.x < s_.group) ends.tops[threadIdx.x] = shared_.ends[Ends::kLogit + threadIdx.x];
    const float largest = largest_of_list(head_ < s_.group ? noise_ : 0.0F);
    if (threadIdx.x != 0) return;
    const float widest = fmaxf(shared_.ends[Ends::kWidest], 0.0F);
    ends.is_wide = 2.0F * kLn2 * largest * widest > kWideList ? 1 : 0;
    ends.pairs = pairs + newer;
  }

  /// Writes what lists that are not read weigh, and how far a row of them may reach.
  __device__ void weigh_others(uint32_t last) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float reach = kMinusInf;
    for_each([&](uint32_t i, bool is_one) {
      if (!is_one) return;
      const bool is_read = bin_of(i) <= last;
      const List list = list_of(i);
      s_.list_weights[(first_ + i) * kHeads + head_] =
          is_read ? 0.0F : weight_of(list, place_of(i).rows);
      if (!is_read) reach = fmaxf(reach, list.score + doubt_reach(noise_, list.figures.widest));
    });
    reach = largest_of_head(reach);
    if (lane < kHeads) shared_.warp_reach[warp][lane] = reach;
    __syncthreads();
    if (threadIdx.x >= s_.group) return;
#pragma unroll
    for (uint32_t w = 0; w < kListWarps; ++w) {
      reach = fmaxf(reach, shared_.warp_reach[w][threadIdx.x]);
    }
    s_.list_ends[kv_head_].reach[rank_][threadIdx.x] = reach;
  }

  const CodesParams& s_;
  Shared& shared_;
  const KeptLists<kHeads> kept_;
  const uint32_t kv_head_, rank_;
  const uint32_t head_;  ///< the thread's
  const float cap_;
  uint32_t begin_ = 0,
           count_ = 0;  ///< the first list of the block among those of the KV head; how many it has
  size_t first_ = 0;    ///< the first among those of all KV heads
  uint32_t listed_ = 0, blocks_ = 0;
  float noise_ = 0.0F;  ///< HeadConstants::noise of the thread's head
};

/// Grid (kListBlocks * KV heads), in clusters of kListBlocks.
template <int kDim, int kHeadTiles>
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ CodesParams s) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char memory[];
  ListChooser<kDim, kHeadTiles>(s, memory).run();
#endif
}

}  // namespace keyhole::gpu::codes
