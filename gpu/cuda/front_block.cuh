// What threads of a block do together in the kernels of a CudaFront.
#pragma once

#include <cstdint>

namespace keyhole::gpu {

inline constexpr uint32_t kAll = 0xffffffffU;  // lanes

/// Sum and largest over a warp, in every lane, in an order that does not change.
__device__ inline float warp_sum(float x) {
  for (uint32_t offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
  for (uint32_t offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAll, x, offset));
  }
  return x;
}

/// Counts this block in, by one thread after a __syncthreads(): what the block wrote before is there for whoever sees the
/// count, and what the others wrote is there for the block, after another one. Returns the count before.
__device__ inline uint32_t arrive(uint32_t* counter) {
  uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

}  // namespace keyhole::gpu
