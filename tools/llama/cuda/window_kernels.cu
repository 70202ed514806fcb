// A window is cut into kParts stretches of equal length, one block each for every query head; the blocks' warps take tokens in
// turn, a token at a time. Two merges by log-sum-exp follow: of a block's warps, and of the parts.
#include "tools/llama/cuda/activation.cuh"
#include "tools/llama/cuda/kv_numbers.cuh"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/reduce.cuh"
#include "tools/llama/cuda/window_kernels.h"
#include "tools/llama/gpu_sizes.h"

namespace keyhole::tools::cuda {
namespace {

constexpr uint32_t kParts = kWindowParts;
constexpr uint32_t kThreads = 128;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kMostDim = 256;
constexpr uint32_t kPairs = kMostDim / 64;  // of components, that a lane has at most

/// exp(x - largest), of nothing at all (both -inf) 0.
__device__ inline float weight_of(float x, float largest) {
  return x == -INFINITY ? 0.0F : expf(x - largest);
}

__global__ void append_kernel(WindowRing ring, WindowStep a) {
  const uint32_t row = ring.kv_heads * ring.head_dim;
  const size_t slot = *a.position % ring.slots;
  for (uint32_t i = 2 * threadIdx.x; i < row; i += 2 * blockDim.x) {
    write_pair(ring.k, ring.numbers, slot * row + i, read_pair(a.k, i));
    write_pair(ring.v, ring.numbers, slot * row + i, read_pair(a.v, i));
  }
}

template <class Number>
__global__ void __launch_bounds__(kThreads) part_kernel(WindowRing ring, WindowStep a) {
  const auto* const keys = static_cast<const Number*>(ring.k);
  const auto* const values = static_cast<const Number*>(ring.v);
  const uint32_t d = ring.head_dim;
  const uint32_t head = blockIdx.x;
  const uint32_t kv_head = head / (a.q_heads / ring.kv_heads);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t tokens = *a.position + 1;
  const uint32_t count = min(tokens, ring.window);
  const uint32_t length = (count + kParts - 1) / kParts;
  const uint32_t begin = min(blockIdx.y * length, count);
  const uint32_t end = min(begin + length, count);

  float2 q[kPairs], sum[kPairs];
#pragma unroll
  for (uint32_t j = 0; j < kPairs; ++j) {
    const uint32_t i = 2 * lane + 64 * j;
    q[j] = i < d ? read_pair(a.q, size_t{head} * d + i) : make_float2(0.0F, 0.0F);
    sum[j] = make_float2(0.0F, 0.0F);
  }
  float largest = -INFINITY;
  float weights = 0.0F;
  for (uint32_t t = begin + warp; t < end; t += kWarps) {
    const uint32_t token = tokens - count + t;
    const size_t row = (size_t{token % ring.slots} * ring.kv_heads + kv_head) * d;
    float dot = 0.0F;
#pragma unroll
    for (uint32_t j = 0; j < kPairs; ++j) {
      const uint32_t i = 2 * lane + 64 * j;
      if (i >= d) continue;
      const float2 k = read_pair(keys, row + i);
      dot = fmaf(q[j].x, k.x, fmaf(q[j].y, k.y, dot));
    }
    float logit = a.scale * warp_sum(dot);
    if (a.softcap > 0.0F) logit = soft_capped(a.softcap, logit);
    const float larger = fmaxf(largest, logit);
    const float shrink = weight_of(largest, larger);
    const float weight = weight_of(logit, larger);
    largest = larger;
    weights = weights * shrink + weight;
#pragma unroll
    for (uint32_t j = 0; j < kPairs; ++j) {
      const uint32_t i = 2 * lane + 64 * j;
      if (i >= d) continue;
      const float2 v = read_pair(values, row + i);
      sum[j] =
          make_float2(fmaf(weight, v.x, sum[j].x * shrink), fmaf(weight, v.y, sum[j].y * shrink));
    }
  }

  __shared__ float warp_largest[kWarps], warp_weights[kWarps], warp_sums[kWarps][kMostDim];
  if (lane == 0) {
    warp_largest[warp] = largest;
    warp_weights[warp] = weights;
  }
#pragma unroll
  for (uint32_t j = 0; j < kPairs; ++j) {
    const uint32_t i = 2 * lane + 64 * j;
    if (i >= d) continue;
    warp_sums[warp][i] = sum[j].x;
    warp_sums[warp][i + 1] = sum[j].y;
  }
  __syncthreads();
  float of_block = -INFINITY;
  for (uint32_t w = 0; w < kWarps; ++w) of_block = fmaxf(of_block, warp_largest[w]);
  float* const out = a.partial + (size_t{head} * kParts + blockIdx.y) * (d + 2);
  for (uint32_t i = threadIdx.x; i < d; i += kThreads) {
    float x = 0.0F;
    for (uint32_t w = 0; w < kWarps; ++w) {
      x += weight_of(warp_largest[w], of_block) * warp_sums[w][i];
    }
    out[2 + i] = x;
  }
  if (threadIdx.x == 0) {
    float all = 0.0F;
    for (uint32_t w = 0; w < kWarps; ++w) {
      all += weight_of(warp_largest[w], of_block) * warp_weights[w];
    }
    out[0] = of_block;
    out[1] = all;
  }
}

__global__ void __launch_bounds__(kThreads)
    merge_kernel(const float* partial, uint32_t d, float* out) {
  const float* const parts = partial + size_t{blockIdx.x} * kParts * (d + 2);
  float largest = -INFINITY;
  for (uint32_t p = 0; p < kParts; ++p) largest = fmaxf(largest, parts[p * (d + 2)]);
  float weights = 0.0F;
  for (uint32_t p = 0; p < kParts; ++p) {
    weights += weight_of(parts[p * (d + 2)], largest) * parts[p * (d + 2) + 1];
  }
  for (uint32_t i = threadIdx.x; i < d; i += kThreads) {
    float x = 0.0F;
    for (uint32_t p = 0; p < kParts; ++p) {
      x += weight_of(parts[p * (d + 2)], largest) * parts[p * (d + 2) + 2 + i];
    }
    out[size_t{blockIdx.x} * d + i] = x / weights;
  }
}

}  // namespace

size_t window_partial_floats(uint32_t q_heads, uint32_t head_dim) {
  return size_t{q_heads} * kParts * (head_dim + 2);
}

void window_attend(const WindowRing& ring, const WindowStep& step, cudaStream_t stream) {
  if (ring.head_dim > kMostDim || ring.head_dim % 2 != 0) {
    throw std::runtime_error("GPU window: head_dim is " + std::to_string(ring.head_dim) +
                             "; allowed: even, at most " + std::to_string(kMostDim));
  }
  if (step.k != nullptr) append_kernel<<<1, 256, 0, stream>>>(ring, step);
  const dim3 grid(step.q_heads, kParts);
  switch (ring.numbers) {
    case KvNumbers::f32: part_kernel<float><<<grid, kThreads, 0, stream>>>(ring, step); break;
    case KvNumbers::f16: part_kernel<__half><<<grid, kThreads, 0, stream>>>(ring, step); break;
    case KvNumbers::bf16:
      part_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(ring, step);
      break;
  }
  merge_kernel<<<step.q_heads, kThreads, 0, stream>>>(step.partial, ring.head_dim, step.out);
  check_launch("a sliding window");
}

}  // namespace keyhole::tools::cuda
