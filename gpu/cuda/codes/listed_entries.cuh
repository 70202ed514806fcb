// A warp's part of the table of pairs that a step with lists reads: 32 entries at a time in its lanes, and what they
// name on its way to the L2 cache before the warp asks for it.
#pragma once

#include "gpu/cuda/codes/pair_places.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

/// Whether two entries are of the same list or block.
__device__ inline bool is_same_owner(const ListedPair& a, const ListedPair& b) {
  constexpr uint32_t kMask = ~((kPairRows - 1) << ListedPair::kRowsAt);
  return ((a.owner ^ b.owner) & kMask) == 0;
}

template <int kDim, int kBits>
class ListedEntries {
 public:
  /// How many entries ahead of the one that is attended are prefetched.
  static constexpr uint32_t kAhead = 4;

  __device__ ListedEntries(const CodesParams& s, uint32_t kv_head) : s_(s), kv_head_(kv_head) {}

  /// Once the choice has ended, or at any time if entries are the pairs of all blocks (reads_all): the warp has entries
  /// [first, end). taken: so many of the first pairs are not prefetched, because they are asked for at once.
  __device__ void start(uint32_t first, uint32_t end, int taken, bool reads_all) {
    reads_all_ = reads_all;
    end_ = end;
    from_ = first;
    load();
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      prefetch(first + i, static_cast<int>(i) >= taken, i == 0);
    }
  }
  /// An entry that is at most 31 - kMoves behind the place of the last move_to(); of no meaning beyond the end.
  [[nodiscard]] __device__ ListedPair of(uint32_t i) const {
    return {__shfl_sync(kWholeWarp, own_.pair, static_cast<int>(i - from_)),
            __shfl_sync(kWholeWarp, own_.owner, static_cast<int>(i - from_))};
  }
  /// Takes other entries into the lanes if this one is not among the first. A list has 8 at most.
  __device__ void move_to(uint32_t i) {
    if (i - from_ < kMoves) return;
    from_ = i;
    load();
  }
  /// Prefetches the mean value of an entry's list, and its codes, or what the pairs of a block have in common, with its
  /// first one or where is_first says so: codes of blocks are asked for soon enough.
  __device__ void prefetch(uint32_t i, bool with_codes, bool is_first = false) const {
    if (i >= end_) return;
    const ListedPair p = of(i);
    const uint32_t lane = threadIdx.x % 32;
    const auto line = [](const std::byte* at) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    };
    constexpr uint32_t kLine = 128, kMean = 2 * kDim;
    if (is_of_block(p)) {
      if (!is_first && p.pair % kBlockMaxima != 0) return;
      constexpr CodeShape kShape{kDim, kBits, kBits};
      constexpr uint32_t kBegin = kShape.key_mean_at() / kLine * kLine;
      const uint32_t at = kBegin + lane * kLine;
      const std::byte* const block =
          s_.blocks + kv_head_ * s_.head_stride + p.pair / kBlockMaxima * s_.block_stride;
      if (at < kShape.noise_at() + sizeof(float)) line(block + at);
      return;
    }
    const std::byte* const mean = reinterpret_cast<const std::byte*>(s_.lists.value_means) +
                                  (size_t{kv_head_} * s_.lists.list_capacity + owner_of(p)) * kMean;
    if (lane * kLine < kMean) line(mean + lane * kLine);
    if (!with_codes) return;
    constexpr uint32_t kBytes = TilePair<kDim, kBits>::kBytes;
    const std::byte* const pair =
        s_.lists.pairs + (size_t{kv_head_} * s_.lists.pair_capacity + p.pair) * kBytes;
#pragma unroll
    for (uint32_t at = 0; at < kBytes; at += 32 * kLine) {
      if (at + lane * kLine < kBytes) line(pair + at + lane * kLine);
    }
  }

 private:
  /// of() is asked for the entries of a list, 8, from one before a move on, and for kAhead or kMostStages more.
  static constexpr uint32_t kMoves = 16;
  static_assert(kMoves + kBlockMaxima + kAhead <= 32 && kMostStages <= kAhead);

  __device__ void load() {
    const uint32_t i = from_ + threadIdx.x % 32;
    own_ = i >= end_ ? ListedPair{} : reads_all_ ? pair_of_block(i) : listed_pairs(s_, kv_head_)[i];
  }

  const CodesParams& s_;
  uint32_t kv_head_;
  bool reads_all_ = false;
  uint32_t from_ = 0, end_ = 0;
  ListedPair own_;  ///< entry from_ + lane
};

}  // namespace keyhole::gpu::codes
