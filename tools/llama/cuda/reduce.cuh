// Sums over the threads of a warp or block.
#pragma once

namespace keyhole::tools::cuda {

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

/// The sum over all threads of a block, in every thread, always added in the same order. All threads call it.
template <int threads>
__device__ inline float block_sum(float x) {
  __shared__ float parts[threads / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < threads / 32; ++i) sum += parts[i];
  __syncthreads();
  return sum;
}

}  // namespace keyhole::tools::cuda
