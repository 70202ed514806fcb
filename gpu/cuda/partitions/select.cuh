// The partitions with the largest merits: a histogram of the merits' leading bits finds the bin of the last one that is
// chosen; what lies above it is chosen, and those in it are ranked. Equal merits: the smaller number first. Every step
// of it gives the same result in any order of threads. (Not cub::BlockRadixSort: it would pass over all keys once per 4
// bits, where this passes over them twice and sorts those of one bin.)
#pragma once

#include <cub/block/block_scan.cuh>

#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/warp.cuh"
#include "gpu/cuda/partitions/kernels.h"

namespace keyhole::gpu {

// Merits are positive and at most the group: their bits order them. 16 bins an octave from 2^-27 on; what is below
// that is alike, a hundred-millionth of a head's weight.
inline constexpr uint32_t kBins = 512;
inline constexpr uint32_t kBinShift = 19;
inline constexpr float kLeastMerit = 0x1p-27F;
inline constexpr uint32_t kLeastMeritBits = (127U - 27U) << 23;
inline constexpr float kMostMerit = 31.0F;
inline constexpr uint32_t kCandidates = 512;  // of the threshold's bin that are ranked at once

/// What a block's threads need to agree on a choice, in shared memory.
template <uint32_t Warps>
struct Selecting {
  uint32_t bins[kBins];
  union {
    uint64_t candidates[kCandidates];
    alignas(16) uint32_t ids[kMostChosen];
  };
  using Scan = cub::BlockScan<uint32_t, 32 * Warps, cub::BLOCK_SCAN_WARP_SCANS>;
  typename Scan::TempStorage scan;
  float sums[Warps][kMaxDeviceGroup];
  uint32_t bin, in_bin, above;  // the threshold's bin, how many are in it and in those above it
  uint32_t found;               // candidates
};

__device__ inline uint32_t merit_key(float merit) {
  if (!(merit >= kLeastMerit)) return 0;  // a NaN, too
  const uint32_t key = __float_as_uint(fminf(merit, kMostMerit)) - kLeastMeritBits;
  return key >> kBinShift == 0 ? 0 : key;
}

/// Counts a key; bin 0, which may hold most of them, is not counted.
__device__ inline void count_key(uint32_t* bins, uint32_t key) {
  if (key != 0) atomicAdd(bins + (key >> kBinShift), 1);
}

/// Sum over the block's threads before this one; `all`: over all of them. Integers: CUB's order does not matter.
template <uint32_t Warps>
__device__ uint32_t sum_before(Selecting<Warps>& s, uint32_t x, uint32_t& all) {
  uint32_t before = 0;
  __syncthreads();  // the scan's memory may still be read by threads that are behind
  typename Selecting<Warps>::Scan(s.scan).ExclusiveSum(x, before, all);
  return before;
}

/// The bin that thread threadIdx.x < kBins looks after: from the top.
__device__ inline uint32_t bin_of_thread() { return kBins - 1 - threadIdx.x; }

/// Sets s.bin, s.in_bin, s.above. of_bin: keys in bin_of_thread(), 0 in further threads. 0 < wanted < count. Returns
/// s.in_bin. Ends with a __syncthreads().
template <uint32_t Warps>
__device__ uint32_t find_threshold(Selecting<Warps>& s, uint32_t of_bin, uint32_t wanted,
                                   uint32_t count) {
  uint32_t counted = 0;
  const uint32_t before = sum_before(s, of_bin, counted);
  if (before < wanted && before + of_bin >= wanted) {
    s.bin = bin_of_thread();
    s.above = before;
    s.in_bin = of_bin;
  }
  if (threadIdx.x == 0 && counted < wanted) {
    s.bin = 0;
    s.above = counted;
    s.in_bin = count - counted;
  }
  __syncthreads();
  return s.in_bin;
}

/// Where a bin holds more candidates than can be ranked at once: the least key that is chosen, and then the
/// first numbers with it, by bisection. Rare (thousands of equal merits), and slow: some tens of passes. keys: of all
/// partitions.
template <uint32_t Warps>
__device__ void choose_among_many(Selecting<Warps>& s, const uint32_t* keys, uint32_t count,
                                  uint32_t wanted, uint32_t* bits) {
  constexpr uint32_t kThreads = 32 * Warps;
  const auto number_of = [&](auto is_in) {
    uint32_t n = 0;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) n += is_in(keys[i], i) ? 1 : 0;
    uint32_t all = 0;
    (void)sum_before(s, n, all);
    return all;
  };
  const uint32_t end = (s.bin + 1) << kBinShift;
  uint32_t least = s.bin << kBinShift;  // at least `wanted` keys of the bin are >= this
  for (uint32_t bit = 1U << (kBinShift - 1); bit > 0; bit /= 2) {
    const uint32_t n =
        number_of([&](uint32_t key, uint32_t) { return key >= (least | bit) && key < end; });
    if (n >= wanted) least |= bit;
  }
  const uint32_t equals =
      wanted - number_of([&](uint32_t key, uint32_t) { return key > least && key < end; });
  uint32_t low = 0;
  uint32_t high = count;  // numbers below it with that key are enough
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const uint32_t n =
        number_of([&](uint32_t key, uint32_t i) { return key == least && i < middle; });
    if (n >= equals) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint32_t key = keys[i];
    if ((key > least && key < end) || (key == least && i < low)) {
      atomicOr(bits + i / 32, 1U << (i % 32));
    }
  }
  __syncthreads();
}

/// A candidate: of equal keys the smaller number ranks first.
__device__ inline uint64_t candidate(uint32_t key, uint32_t id) {
  return uint64_t{key} << 32 | uint32_t(~id);
}

/// Sets the bits of the `wanted` best of the s.found candidates.
template <uint32_t Warps>
__device__ void choose_candidates(const Selecting<Warps>& s, uint32_t wanted, uint32_t* bits) {
  const uint32_t n = s.found;
  if (threadIdx.x < n) {
    const uint64_t mine = s.candidates[threadIdx.x];
    uint32_t rank = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < n; ++j) rank += s.candidates[j] > mine ? 1 : 0;
    const uint32_t id = ~static_cast<uint32_t>(mine);
    if (rank < wanted) atomicOr(bits + id / 32, 1U << (id % 32));
  }
  __syncthreads();
}

/// The numbers whose bits are set, to s.ids, rising. Ends with a __syncthreads().
template <uint32_t Warps>
__device__ void list_chosen(Selecting<Warps>& s, const uint32_t* bits, uint32_t count) {
  constexpr uint32_t kThreads = 32 * Warps;
  const uint32_t words = (count + 31) / 32;
  uint32_t listed = 0;
  for (uint32_t begin = 0; begin < words; begin += kThreads) {
    const uint32_t word = begin + threadIdx.x;
    uint32_t left = word < words ? bits[word] : 0;
    uint32_t all = 0;
    uint32_t at = listed + sum_before(s, __popc(left), all);
    for (; left != 0; left &= left - 1) s.ids[at++] = 32 * word + __ffs(left) - 1;
    listed += all;
  }
  __syncthreads();
}

/// Hands s.ids to the host: one warp, so that one fence covers all of it.
template <uint32_t Warps>
__device__ void publish(const Selecting<Warps>& s, const PartitionsLayer& l, uint32_t kv_head,
                        uint32_t count, uint32_t sequence) {
  if (threadIdx.x >= 32) return;
  auto* to = reinterpret_cast<uint4*>(l.ids + size_t{kv_head} * l.most_chosen);
  for (uint32_t i = threadIdx.x; i < (count + 3) / 4; i += 32) {
    to[i] = reinterpret_cast<const uint4*>(s.ids)[i];
  }
  PartitionsFlag* flag = l.flags + kv_head;
  if (threadIdx.x == 0) flag->count = count;
  __syncwarp();
  if (threadIdx.x != 0) return;
  store_release_system(&flag->sequence, sequence);
}

/// For each head what a share must be for the partition's value to be read, see kLeastOfMean: from the shares of
/// the chosen ones, share(id, head of the group).
template <uint32_t Warps, class Share>
__device__ void set_least_shares(Selecting<Warps>& s, const PartitionsLayer& l, uint32_t kv_head,
                                 uint32_t count, uint32_t chosen, const Share& share) {
  const uint32_t h = threadIdx.x % l.padded;
  float sum = 0.0F;
#pragma unroll 2
  for (uint32_t i = threadIdx.x / l.padded; i < chosen; i += 32 * Warps / l.padded) {
    sum += share(s.ids[i], h);
  }
  for (uint32_t offset = 16; offset >= l.padded; offset /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, offset);
  }
  if (threadIdx.x % 32 < l.padded) s.sums[threadIdx.x / 32][h] = sum;
  __syncthreads();
  if (threadIdx.x >= l.group) return;
  sum = 0.0F;
  for (uint32_t w = 0; w < Warps; ++w) sum += s.sums[w][threadIdx.x];
  // Where next to nothing is left, the difference is rounding.
  constexpr float kNothing = 1e-4F;
  const float left = 1.0F - sum;
  const auto others = static_cast<float>(max(count - chosen, 1U));
  l.least_shares[kv_head * l.group + threadIdx.x] =
      left > kNothing ? kLeastOfMean * left / others : 0.0F;
}

}  // namespace keyhole::gpu
