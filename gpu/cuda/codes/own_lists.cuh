// The lists of a thread block of the choice among lists (gpu/cuda/codes/list_choice.cuh): what it knows of them, and
// their codes on the way to the L2 cache. Where heads count, kHeads neighbouring threads have a list, each one head of
// it: code that runs once is slow, because its instructions come from memory, and so there is one copy of it and not
// kHeads.
#pragma once

#include "gpu/cuda/codes/list_blocks.cuh"
#include "gpu/cuda/codes/list_rule.cuh"
#include "gpu/cuda/codes/list_shared.cuh"
#include "gpu/cuda/common/async_copy.cuh"

namespace keyhole::gpu::codes {

/// The bin of lists that are read beside those of the share (gpu/cuda/codes/more_lists.cuh).
inline constexpr uint32_t kMoreBin = 0xFFFFU;
static_assert(kListBins <= kMoreBin);

/// Where a block's parts of what is told lie, one behind the other, for blocks that tell each other by memory.
template <int kHeadTiles, class Blocks>
constexpr size_t kMoreToldAt = (sizeof(ListTold<4 * kHeadTiles, Blocks::kBlocks>) + 15) / 16 * 16;

/// Blocks: those of a KV head, ClusterOfBlocks or GridOfBlocks.
template <int kDim, int kHeadTiles, class Blocks>
struct OwnLists {
  static constexpr uint32_t kBlocks = Blocks::kBlocks;
  static constexpr uint32_t kHeads = 4 * kHeadTiles;
  static constexpr uint32_t kAtOnce =
      kListThreads / kHeads;  ///< lists that the block has at once, by head
  using Shared = ListShared<kDim, kHeadTiles, Blocks>;
  using Ends = ListExtremes<kHeads>;

  /// kept_memory: of the lists that are kept.
  __device__ OwnLists(const CodesParams& s, Shared& shared, unsigned char* kept_memory)
      : s(s),
        shared(shared),
        kept(kept_memory, s.lists.kept),
        kv_head(blockIdx.x / kBlocks),
        rank(blockIdx.x % kBlocks),
        blocks(s, kv_head),
        head(threadIdx.x % kHeads),
        cap(s.logits.softcap * kLog2E) {
    // Lists are older than the kernel before this one: the call that makes them ends with a kernel.
    const uint32_t all = __ldcg(&s.lists.counts[kv_head]);
    const uint32_t share = (all + kListTile * kBlocks - 1) / (kListTile * kBlocks) * kListTile;
    begin = min(rank * share, all);
    count = min(begin + share, all) - begin;
    first = size_t{kv_head} * s.lists.list_capacity + begin;
  }

  /// What the block tells the others.
  [[nodiscard]] __device__ typename Shared::Told& told() const {
    if constexpr (Blocks::kTellByMemory) {
      return *reinterpret_cast<typename Shared::Told*>(told_memory());
    } else {
      return shared.told;
    }
  }
  [[nodiscard]] __device__ std::byte* told_memory() const {
    return s.told + (size_t{kv_head} * kBlocks + rank) * s.told_stride;
  }

  // i: a list's number among those of the block.
  [[nodiscard]] __device__ bool is_kept(uint32_t i) const { return i < kept.count; }
  [[nodiscard]] __device__ ListPlace place_of(uint32_t i) const {
    return is_kept(i) ? kept.places[i] : s.lists.places[first + i];
  }
  [[nodiscard]] __device__ uint32_t bin_of(uint32_t i) const {
    return is_kept(i) ? kept.bins[i] : s.list_bins[first + i];
  }
  __device__ void note_bin(uint32_t i, uint32_t bin) const {
    if (is_kept(i)) {
      kept.bins[i] = static_cast<uint16_t>(bin);
    } else {
      s.list_bins[first + i] = bin;
    }
  }
  /// last: the last bin that is read by the share.
  [[nodiscard]] __device__ bool is_read(uint32_t i, uint32_t last) const {
    const uint32_t bin = bin_of(i);
    return bin <= last || bin == kMoreBin;
  }
  [[nodiscard]] __device__ static uint32_t pairs_of_list(const ListPlace& place) {
    return (place.rows + kPairRows - 1) / kPairRows;
  }

  /// A list for a head.
  struct List {
    ListFigures figures;
    ListLogit logit;
    float score;
  };
  /// noise_of_head: HeadConstants::noise.
  [[nodiscard]] __device__ List list_of(uint32_t i, uint32_t h, float noise_of_head) const {
    List list;
    const bool is_here = is_kept(i);
    list.score = is_here ? kept.scores[i * kHeads + h] : s.list_scores[(first + i) * kHeads + h];
    list.figures = is_here ? kept.figures[i] : s.lists.figures[first + i];
    list.logit = logit_of_list(list.score, noise_of_head, list.figures.spread, cap);
    return list;
  }
  /// For the thread's head.
  [[nodiscard]] __device__ List list_of(uint32_t i) const { return list_of(i, head, noise); }
  [[nodiscard]] __device__ static float hope_of(const List& list) {
    return hope_of_list(list.logit, list.figures.log_rows);
  }
  /// What the rows of a list weigh together, relative to the head's largest mean logit.
  [[nodiscard]] __device__ float weight_of(const List& list, uint32_t rows, uint32_t h) const {
    return static_cast<float>(rows) *
           weight_of_list(list.logit, list.figures.log_rows, shared.ends[Ends::kLogit + h]);
  }
  /// weight_of() as note_weight() has it, of any thread before the last barrier.
  [[nodiscard]] __device__ float noted_weight(uint32_t i, uint32_t h) const {
    return is_kept(i) ? kept.weights[i * kHeads + h] : s.list_weights[(first + i) * kHeads + h];
  }
  __device__ void note_weight(uint32_t i, float weight) const {
    if (is_kept(i)) {
      kept.weights[i * kHeads + head] = weight;
    } else {
      s.list_weights[(first + i) * kHeads + head] = weight;
    }
  }
  /// Calls visit(i, whether there is such a list) for all lists of the block, by whole warps.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll 1
    for (uint32_t from = 0; from < count; from += kAtOnce) {
      const uint32_t i = from + threadIdx.x / kHeads;
      visit(min(i, count - 1), i < count);
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
  [[nodiscard]] __device__ static float sum_of_head(float x) {
#pragma unroll
    for (uint32_t step = kHeads; step < 32; step *= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
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
  /// Brings a list's codes on their way to the L2 cache, of the first lists: of 128k tokens these are all.
  __device__ void prefetch_codes(uint32_t i, const ListPlace& place) const {
    if (i >= kListThreads) return;
    const uint32_t bytes =
        2 * kCodeLanes * 4 * (s.shape.key_words() + s.shape.value_words()) + kPairRows * 4;
    const size_t pair = size_t{kv_head} * s.lists.pair_capacity + place.first_pair;
    prefetch_bulk(s.lists.pairs + pair * bytes, pairs_of_list(place) * bytes);
  }

  const CodesParams& s;
  Shared& shared;
  const KeptLists<kHeads> kept;
  const uint32_t kv_head, rank;
  const Blocks blocks;
  const uint32_t head;  ///< the thread's
  const float cap;
  /// The first list of the block among those of the KV head; how many it has
  uint32_t begin = 0, count = 0;
  size_t first = 0;    ///< the first among those of all KV heads
  float noise = 0.0F;  ///< HeadConstants::noise of the thread's head, once queries are prepared
};

}  // namespace keyhole::gpu::codes
