// Elements of tensors: loads, conversions to and from fp32, stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "cpu/types.h"

namespace keyhole::gpu {

template <class T>
__device__ inline T rounded_to(float x);
template <>
__device__ inline float rounded_to<float>(float x) {
  return x;
}
template <>
__device__ inline __half rounded_to<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 rounded_to<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__half x) { return __half2float(x); }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline uint16_t bits(__half x) { return __half_as_ushort(x); }
__device__ inline uint16_t bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
/// Packs two 16-bit numbers into one register, the first in the low half.
template <class T>
__device__ inline uint32_t packed(T low, T high) {
  return uint32_t{bits(low)} | (uint32_t{bits(high)} << 16U);
}

/// Loads element `at` of an array whose dtype is known at run time.
__device__ inline float load_element(const void* data, DType dtype, size_t at) {
  switch (dtype) {
    case DType::f16: return __half2float(static_cast<const __half*>(data)[at]);
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}

/// 4 elements as they lie in memory. Loading and converting are two steps, so that no load waits for another: a trip
/// to memory takes half a microsecond, and a whole resident step seven.
struct RawQuad {
  uint32_t words[4];
};
/// Loads elements at .. at+3 of an array whose dtype is known at run time; any alignment.
__device__ inline RawQuad load_raw(const void* data, DType dtype, size_t at) {
  RawQuad raw{};
  if (dtype == DType::f32) {
    const auto* from = static_cast<const uint32_t*>(data) + at;
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      raw = {x.x, x.y, x.z, x.w};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.words[i] = from[i];
    }
  } else {
    const auto* from = static_cast<const uint16_t*>(data) + at;
    if (reinterpret_cast<uintptr_t>(from) % 8 == 0) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      raw.words[0] = x.x;
      raw.words[1] = x.y;
    } else {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = from[i];
      raw.words[0] = x[0] | (x[1] << 16U);
      raw.words[1] = x[2] | (x[3] << 16U);
    }
  }
  return raw;
}
/// load_raw() for four elements that begin at a multiple of their size: a tenth of the instructions.
__device__ inline RawQuad load_aligned(const void* data, DType dtype, size_t at) {
  if (dtype == DType::f32) {
    const uint4 x = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(data) + at);
    return {{x.x, x.y, x.z, x.w}};
  }
  const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
  return {{x.x, x.y, 0, 0}};
}
__device__ inline void convert(const RawQuad& raw, DType dtype, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto half = static_cast<uint16_t>(raw.words[i / 2] >> (i % 2 * 16));
    x[i] = dtype == DType::f32   ? __uint_as_float(raw.words[i])
           : dtype == DType::f16 ? __half2float(__ushort_as_half(half))
                                 : __bfloat162float(__ushort_as_bfloat16(half));
  }
}

/// Bytes of an element of dtype f32, f16 or bf16.
__device__ inline size_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
/// Rounds 4 numbers to what remains of them when they are stored as `dtype`.
__device__ inline void round_elements(DType dtype, float (&x)[4]) {
#pragma unroll
  for (float& e : x) {
    if (dtype == DType::f16) e = __half2float(__float2half_rn(e));
    if (dtype == DType::bf16) e = __bfloat162float(__float2bfloat16_rn(e));
  }
}

/// Stores 4 elements, with one store where the address is aligned for it.
template <class T>
__device__ inline void store_typed(T* to, const float (&x)[4]) {
  struct alignas(4 * sizeof(T)) Vector {
    T elements[4];
  } vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) vector.elements[i] = rounded_to<T>(x[i]);
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vector) == 0) {
    *reinterpret_cast<Vector*>(to) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = vector.elements[i];
  }
}
__device__ inline void store_elements(void* data, DType dtype, size_t at, const float (&x)[4]) {
  switch (dtype) {
    case DType::f16: store_typed(static_cast<__half*>(data) + at, x); break;
    case DType::bf16: store_typed(static_cast<__nv_bfloat16*>(data) + at, x); break;
    default: store_typed(static_cast<float*>(data) + at, x);
  }
}

}  // namespace keyhole::gpu
