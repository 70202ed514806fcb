// The choice of the lists that a step reads, by the rule of index/scan/list_choice.h: lists in the order of ln n + s +
// t, each by the head for which it stands out most above that head's lightest list, until a share of the rows is read,
// and then more of them for heads that look at everything (gpu/cuda/codes/more_lists.cuh), if ListShare::miss says so.
// Where that makes lists slower than all blocks, these are read, and in the next steps at once
// (gpu/cuda/codes/list_memory.cuh).
//
// 8 or 16 thread blocks have a KV head, each an eighth or a sixteenth of its lists in their order: a cluster, or where
// the GPU has none as many blocks of a grid that all run at once (gpu/cuda/codes/list_blocks.cuh):
//
//   score    products of the queries with the mean keys, on tensor cores: means in fp16, queries as the sum of two fp16
//            numbers (22 bits). The first means are asked for before the kernels before this one have ended
//   extremes of each head, by all blocks for all
//   bins     of an eighth of a nat: rows and pairs of tiles by how far their list is below the best
//   table    of the pairs of tiles that the pass reads: those of the share's lists, list by list, then those of more
//            lists, then those of the blocks that no list has. From the bins of all blocks each knows where its part
//            begins
//   more     lists of heads that would leave too much: what the lists of all blocks weigh is known by the time the
//            table is written
//   weights  of the lists that are not read, which the pass attends by their means
//
// The kernel is a chain of latencies, which two barriers of all blocks divide: behind extremes and bins. `miss` takes
// one more, and three where a head has more lists read.
#pragma once

#include "cpu/code_doubt.h"
#include "gpu/cuda/codes/doubt.cuh"
#include "gpu/cuda/codes/list_memory.cuh"
#include "gpu/cuda/codes/more_lists.cuh"
#include "gpu/cuda/codes/own_lists.cuh"
#include "gpu/cuda/codes/pair_places.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"

namespace keyhole::gpu::codes {

/// The choice for a KV head, by Blocks::kBlocks thread blocks.
template <int kDim, int kHeadTiles, class Blocks>
class ListChooser {
 public:
  static constexpr uint32_t kHeads = 4 * kHeadTiles, kBlocks = Blocks::kBlocks;
  using Own = OwnLists<kDim, kHeadTiles, Blocks>;
  using Shared = ListShared<kDim, kHeadTiles, Blocks>;
  using More = MoreLists<kDim, kHeadTiles, Blocks>;
  using Ends = ListExtremes<kHeads>;

  /// memory: Shared, behind it MoreShared where more lists may be read, and then the lists that are kept.
  __device__ ListChooser(const CodesParams& s, unsigned char* memory)
      : s_(s),
        shared_(*reinterpret_cast<Shared*>(memory)),
        asks_(More::is_asked(s)),
        own_(s, shared_, memory + sizeof(Shared) + (asks_ ? sizeof(typename More::Shared) : 0)) {}

  __device__ void run() {
    StepMemory memory(s_);
    const uint32_t left = threadIdx.x < 2 ? memory.left() : 0;
    if (const int votes = __syncthreads_count(left > threadIdx.x ? 1 : 0); votes != 0) {
      // All thread blocks go here or none: what they read changes when all of them have.
      read_blocks(memory, left, votes > 1);
      return;
    }
    const CodesLists& l = s_.lists;
    const uint32_t warp = threadIdx.x / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto* const means = reinterpret_cast<const __half*>(l.key_means) + own_.first * kDim;
    MeanRows<kDim> rows;
    if (warp * kListTile < own_.count) {
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m)
        rows.load(means, warp * kListTile + lane / 4, own_.count, m, lane);
    }
    own_.blocks.arrive_started();
    prefetch_means(means);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < min(own_.count, own_.kept.count); i += kListThreads) {
      own_.kept.figures[i] = l.figures[own_.first + i];
      own_.kept.places[i] = l.places[own_.first + i];
    }
    for (uint32_t i = threadIdx.x; i < kListBins; i += kListThreads) own_.told().bins[i] = {0, 0};
    if (threadIdx.x == 0) shared_.last_bin = kListBins - 1;
    if (asks_) more().start();
    wait_for_kernels_before();
    let_next_kernel_start();
    const StepHeads heads{s_, 0, kHeads};
    RawQueries<kDim, kHeads, kListWarps> raw;
    raw.load(heads, own_.kv_head);
    listed_ = __ldcg(l.listed) * kCodeBlock;
    blocks_ = __ldcg(s_.block_count);
    shared_.queries.prepare(heads, raw, shared_.q);
    __syncthreads();
    shared_.split.make(shared_.queries);
    own_.noise = shared_.queries.constants[own_.head].noise;
    __syncthreads();
#pragma unroll 1
    for (uint32_t tile = warp * kListTile; tile < own_.count; tile += kListWarps * kListTile) {
      score(rows, means, tile, lane);
    }
    __syncthreads();
    find_extremes();
    fill_bins();
    own_.blocks.arrive();
    if (asks_) more().add_values();
    own_.blocks.wait();
    uint32_t written = 0, pairs = 0;
    const uint32_t last = find_last_bin(written, pairs);
    const uint32_t by_share = pairs;
    bool reads_all = false;
    prefetch_codes(last);
    if (asks_) more().add_left(last);
    own_.blocks.arrive();
    write_lists(written, [&](uint32_t i) { return own_.bin_of(i) <= last; });
    if (asks_) {
      own_.blocks.wait();
      uint32_t before = 0;
      const uint32_t added = more().read_more(last, before);
      const float most = s_.lists.share.most * static_cast<float>(listed_ / kPairRows);
      reads_all = added != 0 && static_cast<float>(pairs + added) > most;
      if (added != 0 && !reads_all) {
        write_lists(pairs + before, [&](uint32_t i) { return own_.bin_of(i) == kMoreBin; });
      }
      pairs += added;
      own_.blocks.arrive();
    }
    const bool tells = own_.rank == 0;
    if (threadIdx.x == 0) memory.arrive(tells ? by_share : 0, tells ? pairs : 0);
    if (reads_all) {
      if (own_.rank == 0 && threadIdx.x == 0) take_all_blocks(own_.kv_head);
    } else {
      write_blocks(pairs);
      weigh_others(last);
    }
    if (threadIdx.x == 0) memory.conclude_choice(blocks_);
    own_.blocks.leave();
  }

 private:
  /// Made where it is used: kept as a member it would keep `own_` out of registers.
  [[nodiscard]] __device__ More more() const {
    return {own_, reinterpret_cast<unsigned char*>(&shared_ + 1)};
  }
  /// Brings mean keys on their way to the L2 cache while the kernels before this one still run, behind those that warps
  /// ask for at once: up to 32 MB in all, for there are contexts whose means no cache holds. A block with few tiles
  /// gains nothing by it.
  __device__ void prefetch_means(const __half* means) const {
    constexpr uint32_t kMostTiles = 128, kFewTiles = 64;
    const uint32_t list = threadIdx.x * kListTile;
    if (own_.count <= kFewTiles * kListTile || list >= own_.count) return;
    if (threadIdx.x < kListWarps || threadIdx.x >= kMostTiles) return;
    prefetch_bulk(means + size_t{list} * kDim, min(kListTile, own_.count - list) * kDim * 2);
  }
  /// Brings the codes of the first lists that are read on their way to the L2 cache: the pass can ask for them when it
  /// has seen the table.
  __device__ void prefetch_codes(uint32_t last) const {
    const uint32_t i = threadIdx.x;
    if (i < own_.count && own_.bin_of(i) <= last) own_.prefetch_codes(i, own_.place_of(i));
  }

  /// The scores of a tile of 16 lists, by a warp; loads the rows of its next one.
  __device__ void score(MeanRows<kDim>& rows, const __half* means, uint32_t tile, int lane) {
    constexpr int kColumns = SplitQueries<kDim, kHeadTiles>::kColumns;
    const uint32_t next = tile + kListWarps * kListTile;
    float sums[kColumns][4] = {};
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
      const uint32_t a[4] = {rows.of[0][m].x, rows.of[1][m].x, rows.of[0][m].y, rows.of[1][m].y};
      if (next < own_.count) rows.load(means, next + lane / 4, own_.count, m, lane);
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
        if (list >= own_.count) continue;
        const float2 two = {sums[c][2 * r] * unit.x, sums[c][2 * r + 1] * unit.y};
        *reinterpret_cast<float2*>(s_.list_scores + (own_.first + list) * kHeads + h) = two;
        if (own_.is_kept(list))
          *reinterpret_cast<float2*>(own_.kept.scores + list * kHeads + h) = two;
      }
    }
  }

  /// Leaves the extremes of all lists of the KV head in shared.ends.
  __device__ void find_extremes() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float top = kMinusInf, low = kMinusInf, logit = kMinusInf, widest = kMinusInf;
    own_.for_each([&](uint32_t i, bool) {
      const auto list = own_.list_of(i);
      const float hope = own_.hope_of(list);
      top = fmaxf(top, hope);
      low = fmaxf(low, -hope);
      logit = fmaxf(logit, list.logit.logit);
      widest = fmaxf(widest, list.figures.widest);
    });
    float* const ends = shared_.warp_ends[warp];
    top = Own::largest_of_head(top), low = Own::largest_of_head(low),
    logit = Own::largest_of_head(logit);
    widest = Own::largest_of_head(widest);
    if (lane < kHeads) {
      ends[Ends::kTop + lane] = top;
      ends[Ends::kLow + lane] = low;
      ends[Ends::kLogit + lane] = logit;
      if (lane == 0) ends[Ends::kWidest] = widest;
    }
    __syncthreads();
    own_.blocks.wait_started();
    if (threadIdx.x < Ends::kNumbers) {
      float of_block = kMinusInf;
#pragma unroll
      for (uint32_t w = 0; w < kListWarps; ++w) {
        of_block = fmaxf(of_block, shared_.warp_ends[w][threadIdx.x]);
      }
#pragma unroll
      for (uint32_t b = 0; b < kBlocks; ++b) {
        *own_.blocks.in_block(&own_.told().block_ends[own_.rank][threadIdx.x], b) = of_block;
      }
    }
    own_.blocks.barrier();
    if (threadIdx.x < Ends::kNumbers) {
      float of_all = kMinusInf;
#pragma unroll
      for (uint32_t b = 0; b < kBlocks; ++b) {
        of_all = fmaxf(of_all, own_.blocks.read(&own_.told().block_ends[b][threadIdx.x]));
      }
      shared_.ends[threadIdx.x] = of_all;
    }
    __syncthreads();
  }

  /// Fills the bins, and notes that of each list. A barrier of all blocks comes between this and find_last_bin().
  __device__ void fill_bins() {
    const float top = shared_.ends[Ends::kTop + own_.head];
    const float low = fmaxf(-shared_.ends[Ends::kLow + own_.head], top - kDeepestList);
    const bool counts = own_.head < s_.group;
    const float most = Own::largest_of_list(counts ? top - low : 0.0F);
    own_.for_each([&](uint32_t i, bool is_one) {
      const auto list = own_.list_of(i);
      const float gain = Own::largest_of_list(counts ? own_.hope_of(list) - low : kMinusInf);
      if (asks_ && is_one) {
        own_.note_weight(i, own_.weight_of(list, own_.place_of(i).rows, own_.head));
      }
      if (!is_one || own_.head != 0) return;
      const float step = (most - gain) * kBinsPerNat;
      const uint32_t bin = step < kListBins - 1.0F
                               ? static_cast<uint32_t>(fmaxf(step, 0.0F))
                               : kListBins - 1;  // the last for what is no number
      const ListPlace place = own_.place_of(i);
      atomicAdd(&own_.told().bins[bin].x, place.rows);
      atomicAdd(&own_.told().bins[bin].y, Own::pairs_of_list(place));
      own_.note_bin(i, bin);
    });
  }

  /// The last bin for all before and in it to have at most so many rows, at least the first that has any. written: gets
  /// the pairs of the blocks before this one that are read, pairs: of all blocks.
  __device__ uint32_t find_last_bin(uint32_t& written, uint32_t& pairs) {
    static_assert(kListBins == 2 * kListThreads, "a thread has two bins");
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, bin = 2 * threadIdx.x;
    uint32_t rows[2] = {}, before[2] = {}, of_all[2] = {};
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint4 two = own_.blocks.read(
          reinterpret_cast<const uint4*>(own_.blocks.in_block(&own_.told().bins[bin], b)));
      rows[0] += two.x, rows[1] += two.z;
      of_all[0] += two.y, of_all[1] += two.w;
      if (b < own_.rank) before[0] += two.y, before[1] += two.w;
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

  /// Writes the pairs of the block's lists for which takes(list) is true to the table, from place `written` on.
  template <class Takes>
  __device__ void write_lists(uint32_t written, const Takes& takes) {
    ListedPair* const table = table_of();
#pragma unroll 1
    for (uint32_t from = 0; from < own_.count; from += kListThreads) {
      const uint32_t i = from + threadIdx.x;
      ListPlace place{};
      if (i < own_.count && takes(i)) place = own_.place_of(i);
      uint32_t all = 0;
      uint32_t at = written + sum_before(Own::pairs_of_list(place), shared_, all);
      written += all;
#pragma unroll 1
      for (uint32_t row = 0; row < place.rows; row += kPairRows) {
        table[at++] = {
            place.first_pair + row / kPairRows,
            (min(place.rows - row, kPairRows) - 1) << ListedPair::kRowsAt | (own_.begin + i)};
      }
    }
  }
  /// A step that does not choose. left: StepMemory::left(); is_expected: the next one does not, either, so that the
  /// pass, which may be told of the one or the other, takes it for one that reads all blocks in any case and waits for
  /// this kernel. One block does it, and waits for the kernels before: the others make room for those of the pass.
  __device__ void read_blocks(StepMemory& memory, uint32_t left, bool is_expected) {
    if (threadIdx.x == 0) memory.arrive(0, 0);
    if (blockIdx.x == 0) {
      if (is_expected) let_next_kernel_start();
      wait_for_kernels_before();
      let_next_kernel_start();
      blocks_ = __ldcg(s_.block_count);
      for (uint32_t h = threadIdx.x; h < s_.kv_heads; h += kListThreads) take_all_blocks(h);
    }
    if (threadIdx.x == 0) memory.conclude(left);
  }
  __device__ void take_all_blocks(uint32_t kv_head) const {
    ChosenLists& ends = s_.list_ends[kv_head];
    ends.reads_all = 1;
    ends.pairs = blocks_ * kBlockMaxima;
  }
  /// Writes the rest of the table, behind the pairs of all lists, and what the choice has come to.
  __device__ void write_blocks(uint32_t pairs) {
    ListedPair* const table = table_of();
    ChosenLists& ends = s_.list_ends[own_.kv_head];
    // The blocks that no list has.
    const uint32_t in_lists = listed_ / kCodeBlock;
    const uint32_t newer = blocks_ > in_lists ? (blocks_ - in_lists) * kBlockMaxima : 0;
#pragma unroll 1
    for (uint32_t i = own_.rank * kListThreads + threadIdx.x; i < newer;
         i += kBlocks * kListThreads) {
      table[pairs + i] = pair_of_block(in_lists * kBlockMaxima + i);
    }
    if (own_.rank != 0) return;
    if (threadIdx.x < s_.group) ends.tops[threadIdx.x] = shared_.ends[Ends::kLogit + threadIdx.x];
    const float largest = Own::largest_of_list(own_.head < s_.group ? own_.noise : 0.0F);
    if (threadIdx.x != 0) return;
    const float widest = fmaxf(shared_.ends[Ends::kWidest], 0.0F);
    ends.is_wide = 2.0F * kLn2 * largest * widest > kWideList ? 1 : 0;
    ends.reads_all = 0;
    ends.pairs = pairs + newer;
  }

  /// Writes what lists that are not read weigh, and how far a row of them may reach.
  __device__ void weigh_others(uint32_t last) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float reach = kMinusInf;
    own_.for_each([&](uint32_t i, bool is_one) {
      if (!is_one) return;
      const bool is_read = own_.is_read(i, last);
      const auto list = own_.list_of(i);
      s_.list_weights[(own_.first + i) * kHeads + own_.head] =
          is_read ? 0.0F
          : asks_ ? own_.noted_weight(i, own_.head)
                  : own_.weight_of(list, own_.place_of(i).rows, own_.head);
      if (!is_read) reach = fmaxf(reach, list.score + doubt_reach(own_.noise, list.figures.widest));
    });
    reach = Own::largest_of_head(reach);
    if (lane < kHeads) shared_.warp_reach[warp][lane] = reach;
    __syncthreads();
    if (threadIdx.x >= s_.group) return;
#pragma unroll
    for (uint32_t w = 0; w < kListWarps; ++w) {
      reach = fmaxf(reach, shared_.warp_reach[w][threadIdx.x]);
    }
    s_.list_ends[own_.kv_head].reach[own_.rank][threadIdx.x] = reach;
  }

  [[nodiscard]] __device__ ListedPair* table_of() const {
    return s_.list_pairs + size_t{own_.kv_head} * most_groups(s_);
  }

  const CodesParams& s_;
  Shared& shared_;
  const bool asks_;  ///< more lists may be read
  Own own_;
  uint32_t listed_ = 0, blocks_ = 0;
};

/// Grid (kBlocks * KV heads), in clusters of kBlocks.
template <int kDim, int kHeadTiles, uint32_t kBlocks>
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ CodesParams s) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char memory[];
  ListChooser<kDim, kHeadTiles, ClusterOfBlocks<kBlocks>>(s, memory).run();
#endif
}

/// The same where there are no clusters; all blocks of the grid run at once.
template <int kDim, int kHeadTiles, uint32_t kBlocks>
__global__ void __launch_bounds__(kListThreads, 1)
    list_grid_kernel(const __grid_constant__ CodesParams s) {
  extern __shared__ __align__(16) unsigned char memory[];
  ListChooser<kDim, kHeadTiles, GridOfBlocks<kBlocks>>(s, memory).run();
}

}  // namespace keyhole::gpu::codes
