// A warp takes two rows, 8 warps a block, two blocks a multiprocessor: 128 KB of weights are asked for at once, where
// 4.8 TB/s times some 700 ns of latency need 26 KB for each of 132 multiprocessors. They are asked for before the kernel in
// front has ended, so that memory does not rest between two products. Over the four products of a layer of Llama-3-8B on an
// H200: 4.12 TB/s, 98 % of what a copy moves; without the early start 3.93. Smaller blocks, and more of them side by side,
// are slower (3.3 to 3.9), as the early blocks of the next product then share multiprocessors with this one's.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "tools/cuda/early_launch.cuh"
#include "tools/cuda/gemv.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kLoads = 8;  // of 16 bytes of each row, asked for before the first is used

__device__ __forceinline__ float dot2(uint32_t a, uint32_t b, float sum) {
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&a));
  const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&b));
  return fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
}

__device__ __forceinline__ float dot8(uint4 a, uint4 b, float sum) {
  return dot2(a.w, b.w, dot2(a.z, b.z, dot2(a.y, b.y, dot2(a.x, b.x, sum))));
}

__global__ void __launch_bounds__(kThreads, 2)
    gemv(const uint4* w, const uint4* x, __half* y, uint32_t rows, uint32_t eights) {
  extern __shared__ uint4 input[];
  start_next_kernel();
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t row = 2 * (blockIdx.x * kWarps + threadIdx.x / kWarp);
  const uint4* const line0 = w + uint64_t{min(row, rows - 1)} * eights;
  const uint4* const line1 = w + uint64_t{min(row + 1, rows - 1)} * eights;
  uint4 first[kLoads], second[kLoads];
  const auto load = [&](uint32_t at) {
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (at + i * kWarp >= eights) break;
      first[i] = load_once(line0 + at + i * kWarp);
      second[i] = load_once(line1 + at + i * kWarp);
    }
  };
  load(lane);
  wait_for_inputs();
  for (uint32_t i = threadIdx.x; i < eights; i += kThreads) input[i] = x[i];
  __syncthreads();
  float2 sum = make_float2(0.0F, 0.0F);
  for (uint32_t at = lane;;) {
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (at + i * kWarp >= eights) break;
      const uint4 eight = input[at + i * kWarp];
      sum.x = dot8(first[i], eight, sum.x);
      sum.y = dot8(second[i], eight, sum.y);
    }
    at += kLoads * kWarp;
    if (at >= eights) break;
    load(at);
  }
#pragma unroll
  for (uint32_t step = kWarp / 2; step != 0; step /= 2) {
    sum.x += __shfl_xor_sync(0xffffffffU, sum.x, step);
    sum.y += __shfl_xor_sync(0xffffffffU, sum.y, step);
  }
  if (lane == 0 && row < rows) y[row] = __float2half_rn(sum.x);
  if (lane == 0 && row + 1 < rows) y[row + 1] = __float2half_rn(sum.y);
}

__global__ void random_numbers(__half* out, uint64_t count, float bound, uint64_t seed) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    // SplitMix64 of the place.
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    const float unit = static_cast<float>(z >> 40) * 0x1p-24F;
    out[i] = __float2half_rn(bound * (2.0F * unit - 1.0F));
  }
}

}  // namespace

cudaError_t enqueue_gemv(const uint16_t* w, const uint16_t* x, uint16_t* y, uint32_t rows,
                         uint32_t columns, cudaStream_t stream) {
  constexpr uint32_t kRows = 2 * kWarps;
  return early_launch(gemv, dim3((rows + kRows - 1) / kRows), dim3(kThreads),
                      columns * sizeof(uint16_t), stream, reinterpret_cast<const uint4*>(w),
                      reinterpret_cast<const uint4*>(x), reinterpret_cast<__half*>(y), rows,
                      columns / 8);
}

cudaError_t enqueue_random(uint16_t* out, uint64_t count, float bound, uint64_t seed,
                           cudaStream_t stream) {
  random_numbers<<<2048, 256, 0, stream>>>(reinterpret_cast<__half*>(out), count, bound, seed);
  return cudaGetLastError();
}

}  // namespace keyhole::tools
