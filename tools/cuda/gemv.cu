#include "tools/cuda/gemv.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tools/cuda/row_pair.cuh"

namespace keyhole::tools {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads, 2)
    gemv(const __nv_bfloat16* w, const uint2* x, __half* y, uint32_t rows, uint32_t columns) {
  extern __shared__ float4 input[];
  start_next_kernel();
  const uint32_t row = 2 * (blockIdx.x * kWarps + threadIdx.x / 32);
  RowPair pair(w, make_uint2(min(row, rows - 1), min(row + 1, rows - 1)), columns);
  wait_for_inputs();
  for (uint32_t i = threadIdx.x; i < columns / 4; i += kThreads) {
    const uint2 four = x[i];
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&four.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&four.y));
    input[place_of_quad(i, columns)] = make_float4(a.x, a.y, b.x, b.y);
  }
  __syncthreads();
  float2 sum = make_float2(0.0F, 0.0F);
  pair.multiply(input, sum);
#pragma unroll
  for (uint32_t step = 16; step != 0; step /= 2) {
    sum.x += __shfl_xor_sync(0xffffffffU, sum.x, step);
    sum.y += __shfl_xor_sync(0xffffffffU, sum.y, step);
  }
  if (threadIdx.x % 32 != 0) return;
  if (row < rows) y[row] = __float2half_rn(sum.x);
  if (row + 1 < rows) y[row + 1] = __float2half_rn(sum.y);
}

__device__ inline void store(__half& to, float x) { to = __float2half_rn(x); }
__device__ inline void store(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }

template <class T>
__global__ void random_numbers(T* out, uint64_t count, float bound, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    // SplitMix64 of the place.
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    const float unit = static_cast<float>(z >> 40) * 0x1p-24F;
    store(out[i], bound * (2.0F * unit - 1.0F));
  }
}

}  // namespace

cudaError_t enqueue_gemv(const uint16_t* w, const uint16_t* x, uint16_t* y, uint32_t rows,
                         uint32_t columns, cudaStream_t stream) {
  constexpr uint32_t kRows = 2 * kWarps;
  const size_t shared = columns * sizeof(float);
  if (shared > 48 << 10) {
    const cudaError_t status = cudaFuncSetAttribute(
        gemv, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (status != cudaSuccess) return status;
  }
  return early_launch(gemv, dim3((rows + kRows - 1) / kRows), dim3(kThreads), shared, stream,
                      reinterpret_cast<const __nv_bfloat16*>(w), reinterpret_cast<const uint2*>(x),
                      reinterpret_cast<__half*>(y), rows, columns);
}

cudaError_t enqueue_random(uint16_t* out, NumberType type, uint64_t count, float bound,
                           uint64_t seed, cudaStream_t stream) {
  if (type == NumberType::f16) {
    random_numbers<<<2048, 256, 0, stream>>>(reinterpret_cast<__half*>(out), count, bound, seed);
  } else {
    random_numbers<<<2048, 256, 0, stream>>>(reinterpret_cast<__nv_bfloat16*>(out), count, bound,
                                             seed);
  }
  return cudaGetLastError();
}

}  // namespace keyhole::tools
