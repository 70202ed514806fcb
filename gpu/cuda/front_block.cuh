// What threads of a block do together in the kernels of a CudaPartitions.
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

/// Numbers of a padded group, aligned as such.
template <uint32_t P>
__device__ void load_group(const float* at, float (&out)[P]) {
  if constexpr (P == 1) {
    out[0] = *at;
  } else if constexpr (P == 2) {
    const float2 x = *reinterpret_cast<const float2*>(at);
    out[0] = x.x;
    out[1] = x.y;
  } else {
#pragma unroll
    for (uint32_t v = 0; v < P; v += 4) {
      const float4 x = *reinterpret_cast<const float4*>(at + v);
      out[v] = x.x;
      out[v + 1] = x.y;
      out[v + 2] = x.z;
      out[v + 3] = x.w;
    }
  }
}

template <uint32_t P>
__device__ void store_group(float* at, const float (&x)[P]) {
  if constexpr (P == 1) {
    *at = x[0];
  } else if constexpr (P == 2) {
    *reinterpret_cast<float2*>(at) = make_float2(x[0], x[1]);
  } else {
#pragma unroll
    for (uint32_t v = 0; v < P; v += 4) {
      *reinterpret_cast<float4*>(at + v) = make_float4(x[v], x[v + 1], x[v + 2], x[v + 3]);
    }
  }
}

}  // namespace keyhole::gpu
