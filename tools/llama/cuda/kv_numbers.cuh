// Numbers of a KV cache in device memory, two at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>

#include "tools/llama/cuda/kv_numbers.h"

namespace keyhole::tools::cuda {

// Reads and writes elements i and i + 1; i is even.
__device__ inline float2 read_pair(const float* from, size_t i) {
  return *reinterpret_cast<const float2*>(from + i);
}
__device__ inline float2 read_pair(const __half* from, size_t i) {
  return __half22float2(*reinterpret_cast<const __half2*>(from + i));
}
__device__ inline float2 read_pair(const __nv_bfloat16* from, size_t i) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + i));
}
__device__ inline void write_pair(float* to, size_t i, float2 x) {
  *reinterpret_cast<float2*>(to + i) = x;
}
__device__ inline void write_pair(__half* to, size_t i, float2 x) {
  *reinterpret_cast<__half2*>(to + i) = __float22half2_rn(x);
}
__device__ inline void write_pair(__nv_bfloat16* to, size_t i, float2 x) {
  *reinterpret_cast<__nv_bfloat162*>(to + i) = __float22bfloat162_rn(x);
}
__device__ inline void write_pair(void* to, KvNumbers numbers, size_t i, float2 x) {
  switch (numbers) {
    case KvNumbers::f32: return write_pair(static_cast<float*>(to), i, x);
    case KvNumbers::f16: return write_pair(static_cast<__half*>(to), i, x);
    case KvNumbers::bf16: return write_pair(static_cast<__nv_bfloat16*>(to), i, x);
  }
}

}  // namespace keyhole::tools::cuda
