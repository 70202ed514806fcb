// Functions of numbers that the kernels of a step over codes share: approximations that are few instructions, each of
// which comes from memory where it runs once, and what the lanes of a head have together.
#pragma once

#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/warp.cuh"

namespace keyhole::gpu::codes {

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Logarithms to 2^-22: absolutely for x between 1/2 and 2, relative to the result for others. The full functions are
/// 25 instructions more, each of which comes from memory where it runs once.
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log_fast(float x) { return log2_fast(x) * kLn2; }
/// natural_weight() with weights below 2^-126 as zeros.
__device__ inline float weight_fast(float lse, float base) {
  return exp2_fast((lse - base) * kLog2E);
}

/// The capped logit of a logit in base 2. cap: log2(e) times the soft-cap. `slope`: gets the derivative.
__device__ inline float capped(float logit, float cap, float& slope) {
  // Computes tanh by an exponential: an error of 2e-7, and five instructions in place of fifty.
  const float e = exp2_fast(2.0F * kLog2E * __fdividef(logit, cap));
  const float t = 1.0F - __fdividef(2.0F, 1.0F + e);
  slope = fmaf(-t, t, 1.0F);
  return cap * t;
}

__device__ inline float max_of_head(float x) {  // over the 8 lanes with the same lane % 4
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
}
__device__ inline float sum_of_head(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

/// The sum over a warp of number lane % 4, returned in all lanes.
__device__ inline float sum_of_own_head(const float (&sums)[4], int lane) {
  // Each exchange halves the number of heads that a lane sums, until only its own is left.
  const bool odd = (lane & 1) != 0;
  const float a =
      (odd ? sums[1] : sums[0]) + __shfl_xor_sync(kWholeWarp, odd ? sums[0] : sums[1], 1);
  const float b =
      (odd ? sums[3] : sums[2]) + __shfl_xor_sync(kWholeWarp, odd ? sums[2] : sums[3], 1);
  const bool high = (lane & 2) != 0;
  return sum_of_head((high ? b : a) + __shfl_xor_sync(kWholeWarp, high ? a : b, 2));
}

}  // namespace keyhole::gpu::codes
