// The numbers of a group of query heads, padded to a power of two and aligned as such, in registers.
#pragma once

#include <cstdint>

namespace keyhole::gpu {

/// P: 1, 2 or a multiple of 4.
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
