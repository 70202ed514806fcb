// A warp's part of the table of pairs that a step with lists reads: 32 entries at a time in its lanes, and what they name on
// its way to the L2 cache before the warp asks for it.
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

  /// Once the choice has ended: the warp has entries [first, end). taken: so many of the first pairs are not prefetched,
  /// because they are asked for at once.
  __device__ void start(uint32_t first, uint32_t end, int taken) {
    end_ = end;
    from_ = first;
    load();
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) prefetch(first + i, static_cast<int>(i) >= taken);
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
  /// Prefetches the mean value of an entry's list, and its codes; blocks are prefetched by nobody, as they are few.
  __device__ void prefetch(uint32_t i, bool with_codes) const {
    if (i >= end_) return;
    const ListedPair p = of(i);
    if (is_of_block(p)) return;
    const uint32_t lane = threadIdx.x % 32;
    const auto line = [](const std::byte* at) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    };
    constexpr uint32_t kLine = 128, kMean = 2 * kDim;
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
    own_ = i < end_ ? listed_pairs(s_, kv_head_)[i] : ListedPair{};
  }

  const CodesParams& s_;
  uint32_t kv_head_;
  uint32_t from_ = 0, end_ = 0;
  ListedPair own_;  ///< entry from_ + lane
};

}  // namespace keyhole::gpu::codes
