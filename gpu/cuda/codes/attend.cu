#include <algorithm>

#include "gpu/cuda/codes/finish.cuh"

namespace keyhole::gpu {
namespace codes {
namespace {

/// The kernels of one shape.
struct Kernels {
  void (*attend)(CodesStep) = nullptr;
  void (*finish)(CodesStep) = nullptr;
  size_t finish_shared = 0;  ///< bytes, beside a float for every 32 rows
};

template <int kDim, int kKeyBits, int kValueBits, int kHeadTiles>
Kernels kernels() {
  return {attend_kernel<kDim, kKeyBits, kValueBits, kHeadTiles>,
          finish_kernel<kDim, kKeyBits, kValueBits, kHeadTiles>,
          sizeof(FinishShared<kDim, kKeyBits, kValueBits, kHeadTiles>)};
}

template <int kDim, int kKeyBits, int kValueBits>
Kernels kernels_for_group(uint32_t group) {
  if (group <= 4) return kernels<kDim, kKeyBits, kValueBits, 1>();
  if (group <= 8) return kernels<kDim, kKeyBits, kValueBits, 2>();
  return kernels<kDim, kKeyBits, kValueBits, 4>();
}

template <int kDim>
Kernels kernels_for_bits(const CodeShape& shape, uint32_t group) {
  if (shape.key_bits == 2 && shape.value_bits == 2) return kernels_for_group<kDim, 2, 2>(group);
  if (shape.key_bits == 4 && shape.value_bits == 4) return kernels_for_group<kDim, 4, 4>(group);
  if (shape.key_bits == 1 && shape.value_bits == 1) return kernels_for_group<kDim, 1, 1>(group);
  return {};
}

Kernels kernels_for(const CodeShape& shape, uint32_t group) {
  switch (shape.dim) {
    case 64: return kernels_for_bits<64>(shape, group);
    case 80: return kernels_for_bits<80>(shape, group);
    case 96: return kernels_for_bits<96>(shape, group);
    case 128: return kernels_for_bits<128>(shape, group);
    default: return {};
  }
}

/// Merges the splits of one query head, and rotates the sum back.
__global__ void merge_kernel(const CodesStep s) {
  __shared__ float row[256];
  __shared__ float weights[kMostSplits];
  __shared__ float shared_total;
  const uint32_t dim = s.shape.dim;
  const uint32_t kv_head = blockIdx.x / s.group;
  const size_t first = size_t{kv_head} * s.splits * s.group + blockIdx.x % s.group;
  float top = kMinusInf;
  if (threadIdx.x < 32) {
    for (uint32_t i = threadIdx.x; i < s.splits; i += 32) {
      top = fmaxf(top, s.part_sum[first + i * s.group].x);
    }
    top = warp_max(top);
    float total = 0.0F;
    for (uint32_t i = threadIdx.x; i < s.splits; i += 32) {
      const float2 part = s.part_sum[first + i * s.group];
      const float keep = part.x == kMinusInf ? 0.0F : exp2_fast(part.x - top);
      weights[i] = keep;
      total = fmaf(keep, part.y, total);
    }
    total = warp_sum(total);
    if (threadIdx.x == 0) {
      shared_total = total;
      s.lse[blockIdx.x] = total == 0.0F ? kMinusInf : (top + log2f(total)) * kLn2;
    }
  }
  // The rows do not wait for the weights.
  float o = 0.0F;
  constexpr uint32_t kAhead = 16;
  for (uint32_t begin = 0; begin < s.splits; begin += kAhead) {
    float x[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const bool there = begin + i < s.splits && threadIdx.x < dim;
      x[i] = there ? s.part_o[(first + (begin + i) * s.group) * dim + threadIdx.x] : 0.0F;
    }
    if (begin == 0) __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (begin + i < s.splits) o = fmaf(weights[begin + i], x[i], o);
    }
  }
  if (threadIdx.x < dim) {
    row[threadIdx.x] = shared_total == 0.0F ? 0.0F : o / shared_total * s.value_scale[kv_head];
  }
  __syncthreads();
  if (threadIdx.x < 32) rotate_in_shared(row, dim, true);
  __syncthreads();
  if (threadIdx.x < dim) s.o[size_t{blockIdx.x} * dim + threadIdx.x] = row[threadIdx.x];
}

}  // namespace
}  // namespace codes

uint32_t code_splits(const CodeShape& shape, uint32_t kv_heads, uint32_t group,
                     uint32_t block_count, uint32_t multiprocessors) {
  const uint32_t resident = group <= 4 && shape.dim <= 128 ? 2 : 1;
  const uint32_t wanted = std::clamp(multiprocessors * resident / kv_heads, 1U, codes::kMostSplits);
  return std::clamp((block_count + codes::kWarps - 1) / codes::kWarps, 1U, wanted);
}

cudaError_t attend_codes(const CodesStep& step, cudaStream_t stream) {
  const codes::Kernels kernels = codes::kernels_for(step.shape, step.group);
  if (kernels.attend == nullptr) return cudaErrorInvalidValue;
  kernels.attend<<<dim3(step.splits, step.kv_heads), codes::kWarps * 32, 0, stream>>>(step);
  return cudaGetLastError();
}

cudaError_t finish_codes(const CodesStep& step, cudaStream_t stream) {
  const codes::Kernels kernels = codes::kernels_for(step.shape, step.group);
  if (kernels.finish == nullptr || step.exact_rows > kMostExactRows) return cudaErrorInvalidValue;
  const size_t bytes = kernels.finish_shared +
                       size_t{step.block_count} * (kCodeBlock / kMaximumRows) * sizeof(float);
  const cudaError_t sized = cudaFuncSetAttribute(
      kernels.finish, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (sized != cudaSuccess) return sized;
  kernels.finish<<<step.kv_heads, codes::kFinishThreads, bytes, stream>>>(step);
  return cudaGetLastError();
}

cudaError_t merge_codes(const CodesStep& step, cudaStream_t stream) {
  const uint32_t threads = (step.shape.dim + 31) / 32 * 32;
  codes::merge_kernel<<<step.kv_heads * step.group, threads, 0, stream>>>(step);
  return cudaGetLastError();
}

}  // namespace keyhole::gpu
