// Finds the largest of many numbers, by a thread block: the value that they exceed, digit by digit, and their places
// in rising order.
#pragma once

#include <cstdint>

#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu {

/// The place of this thread among the threads of the block for which `mine` is true, in their order, behind `count`
/// that came before; count is raised by their number. All threads of the block call it together.
template <uint32_t warps>
__device__ inline uint32_t take_place(bool mine, uint32_t (&counts)[warps], uint32_t& count) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t votes = __ballot_sync(kWholeWarp, mine);
  if (lane == 0) counts[warp] = __popc(votes);
  __syncthreads();
  uint32_t place = count + __popc(votes & ((1U << lane) - 1));
#pragma unroll
  for (uint32_t i = 0; i < warps; ++i) {
    if (i < warp) place += counts[i];
    count += counts[i];
  }
  __syncthreads();
  return place;
}

/// The key of a number that is not negative. Keys have the order of the numbers; 0 (the key of 0 and of NaN) is never
/// among the largest.
__device__ inline uint32_t key_of(float x) { return x > 0.0F ? __float_as_uint(x) : 0; }

/// The largest keys: those above `key`, and the first `equal` of those that equal it.
struct LargestKeys {
  uint32_t key, equal;
};
struct LargestKeysShared {
  uint32_t bins[256];
  uint32_t bin, left;
};
/// Finds the `wanted` largest of the keys key_at(0) .. key_at(count - 1), without zeros; if there are fewer, key and
/// equal are 0. All threads of a block of `threads` call it together; all get the result.
template <uint32_t threads, class KeyAt>
__device__ inline LargestKeys largest_keys(uint32_t count, uint32_t wanted, const KeyAt& key_at,
                                           LargestKeysShared& shared) {
  static_assert(threads % 32 == 0);
  constexpr uint32_t kNone = 256;
  const uint32_t lane = threadIdx.x % 32;
  if (wanted == 0) return {~0U, 0};
  uint32_t key = 0;
  for (uint32_t shift = 32; shift > 0;) {
    shift -= 8;
    for (uint32_t i = threadIdx.x; i < 256; i += threads) shared.bins[i] = 0;
    __syncthreads();
    for (uint32_t first = 0; first < count; first += threads) {
      const uint32_t i = first + threadIdx.x;
      const uint32_t own = i < count ? key_at(i) : 0;
      // Only keys that share the digits found so far count; before the first digit, all.
      const bool counts = own != 0 && (shift == 24 || own >> (shift + 8) == key >> (shift + 8));
      const uint32_t bin = counts ? own >> shift & 255U : kNone;
      // Most numbers of a warp share their first digit, so they are counted together.
      const uint32_t peers = __match_any_sync(kWholeWarp, bin);
      if (counts && lane == static_cast<uint32_t>(__ffs(static_cast<int>(peers))) - 1)
        atomicAdd(&shared.bins[bin], static_cast<uint32_t>(__popc(peers)));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      uint32_t own = 0;
      for (uint32_t i = 0; i < 8; ++i) own += shared.bins[lane * 8 + i];
      uint32_t upward = own;  // number of keys of the lane and of those above it
      for (uint32_t offset = 1; offset < 32; offset *= 2) {
        const uint32_t x = __shfl_down_sync(kWholeWarp, upward, offset);
        if (lane + offset < 32) upward += x;
      }
      if (lane == 0 && upward < wanted) shared.bin = kNone;
      if (upward - own < wanted && upward >= wanted) {
        uint32_t held = upward - own, bin = lane * 8 + 7;
        while (held + shared.bins[bin] < wanted) held += shared.bins[bin--];
        shared.bin = bin;
        shared.left = wanted - held;
      }
    }
    __syncthreads();
    if (shared.bin == kNone) return {0, 0};  // of the first digit alone: later there are enough
    key |= shared.bin << shift;
    wanted = shared.left;
    __syncthreads();  // before the bins are cleared
  }
  return {key, wanted};
}

}  // namespace keyhole::gpu
