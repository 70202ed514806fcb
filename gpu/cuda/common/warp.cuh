// Sums and maxima that the 32 threads of a warp compute together. A lane is a thread's place in its warp, threadIdx.x
// % 32.
//
// cub::WarpReduce is not used: it adds in another order and leaves the sum in one thread. Here every thread has the
// sum, and the order of a butterfly is the same in each of them, so that results do not depend on which thread writes
// them.
#pragma once

#include <cstdint>

namespace keyhole::gpu {

inline constexpr uint32_t kWholeWarp = 0xffffffffU;  ///< the mask of all threads

/// Sum over a warp, in every thread.
__device__ inline float warp_sum(float x) {
  for (uint32_t offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kWholeWarp, x, offset);
  return x;
}

/// Maximum over a warp, in every thread.
__device__ inline float warp_max(float x) {
  for (uint32_t offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, offset));
  }
  return x;
}

}  // namespace keyhole::gpu
