// A thread block has the means of 128 groups of queries of a head and of 64 blocks of rows, and walks over their
// components 64 (80, 96) at a time: the products of blocked_kernel.cuh.
#include <string>

#include "gpu/cuda/prefill/blocked_kernel.cuh"
#include "gpu/cuda/prefill/group_weights.h"

namespace keyhole::gpu {
namespace {

using blocked::kPitch;
using blocked::kThreads;

constexpr int kTiles = 2;  ///< of 16 groups of queries of a warp
constexpr int kQueryGroups = blocked::kQueries<kTiles>, kBlocks = 64;

/// Rows of heads.
struct HeadRows {
  const void* data = nullptr;
  size_t head_stride = 0, row_stride = 0;  ///< elements
  uint32_t rows = 0;
};

/// wide: components of a step.
template <class T, int wide>
__global__ void __launch_bounds__(kThreads, 2)
    mean_product_kernel(const __grid_constant__ BlockedParams a,
                        const __grid_constant__ SampledWeights w,
                        const __grid_constant__ Means means, uint32_t dim) {
  constexpr int kStage = (kQueryGroups + kBlocks) * kPitch<wide>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const stages = reinterpret_cast<T*>(memory);

  const uint32_t head = blockIdx.z, kv_head = head / (a.q_heads / a.kv_heads);
  if (!w.heads.has(head)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t first = blockIdx.y * kQueryGroups, first_block = blockIdx.x * kBlocks;
  float* const weights = w.weights + size_t{head} * w.samples * w.blocks;
  // The position of a group's last query.
  const auto last_of = [&](uint32_t group) {
    return a.first + min((group + 1) * w.stride, a.n) - 1;
  };
  if (first_block * kListRows > last_of(min(first + kQueryGroups, w.samples) - 1)) {
    for (uint32_t i = threadIdx.x; i < kQueryGroups * kBlocks; i += kThreads) {
      const uint32_t group = first + i / kBlocks, block = first_block + i % kBlocks;
      if (group < w.samples && block < w.blocks)
        weights[size_t{group} * w.blocks + block] = kMinusInf;
    }
    return;
  }

  const T* const queries = static_cast<const T*>(means.queries) + size_t{head} * w.samples * dim;
  const T* const rows = static_cast<const T*>(means.rows) + size_t{kv_head} * w.blocks * dim;
  const uint32_t steps = dim / wide;
  const auto fetch = [&](uint32_t step) {
    T* const to = stages + step % 2 * kStage;
    blocked::fetch_rows<wide, kQueryGroups>(to, queries + step * wide, dim, first, w.samples);
    blocked::fetch_rows<wide, kBlocks>(to + kQueryGroups * kPitch<wide>, rows + step * wide, dim,
                                       first_block, w.blocks);
    commit_copies();
  };
  fetch(0);
  const uint32_t q_lane =
      shared_address(stages + (warp * kTiles * 16 + lane % 16) * kPitch<wide> + lane / 16 * 8);
  const uint32_t k_lane = shared_address(
      stages + (kQueryGroups + lane / 16 * 8 + lane % 8) * kPitch<wide> + lane / 8 % 2 * 8);
  float s[kTiles][kBlocks / 8][4] = {};
  for (uint32_t step = 0; step < steps; ++step) {
    __syncthreads();  // all warps are done with the stage before
    if (step + 1 < steps) {
      fetch(step + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const uint32_t stage = step % 2 * kStage * sizeof(T);
#pragma unroll
    for (int part = 0; part < wide / 16; ++part) {
      uint32_t q[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        load_matrices(q[t], q_lane + stage + (t * 16 * kPitch<wide> + part * 16) * sizeof(T));
#pragma unroll
      for (int pair = 0; pair < kBlocks / 16; ++pair) {
        uint32_t k[4];
        load_matrices(k, k_lane + stage + (pair * 16 * kPitch<wide> + part * 16) * sizeof(T));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          multiply_add<T>(s[t][2 * pair], q[t], k[0], k[1]);
          multiply_add<T>(s[t][2 * pair + 1], q[t], k[2], k[3]);
        }
      }
    }
  }

  const float scale = a.logits.scale, cap = a.logits.softcap;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t group = first + (warp * kTiles + t) * 16 + lane / 4 + half * 8;
      const bool there = group < w.samples;
      const uint32_t last = last_of(min(group, w.samples - 1));
      float* const to = weights + size_t{group} * w.blocks;
#pragma unroll
      for (int n = 0; n < kBlocks / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x = scale * s[t][n][2 * half + i];
          if (cap > 0.0F) x = cap * tanhf(x / cap);
          const uint32_t block = first_block + n * 8 + lane % 4 * 2 + i;
          if (there && block < w.blocks)
            to[block] = block * kListRows > last ? kMinusInf : x * kLog2E;
        }
      }
    }
  }
}

/// Means of kListRows rows each, by thread blocks of (dim / 2, kMeanLanes): `[heads, groups, dim]`.
constexpr uint32_t kMeanLanes = 4;
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T x, y;
};
template <class T>
__global__ void mean_kernel(const __grid_constant__ HeadRows from, uint32_t dim, T* to) {
  extern __shared__ float2 sums[];
  const uint32_t first = blockIdx.x * kListRows, last = min(first + kListRows, from.rows);
  const T* const rows =
      static_cast<const T*>(from.data) + blockIdx.y * from.head_stride + 2 * threadIdx.x;
  float2 sum{};
#pragma unroll 4
  for (uint32_t i = first + threadIdx.y; i < last; i += kMeanLanes) {
    const auto x = *reinterpret_cast<const Pair<T>*>(rows + i * from.row_stride);
    sum.x += as_float(x.x);
    sum.y += as_float(x.y);
  }
  sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (uint32_t i = 1; i < kMeanLanes; ++i) {
    const float2 more = sums[i * blockDim.x + threadIdx.x];
    sum.x += more.x;
    sum.y += more.y;
  }
  const float share = 1.0F / static_cast<float>(last - first);
  const size_t at = (size_t{blockIdx.y} * gridDim.x + blockIdx.x) * dim + 2 * threadIdx.x;
  *reinterpret_cast<Pair<T>*>(to + at) = {rounded_to<T>(sum.x * share),
                                          rounded_to<T>(sum.y * share)};
}

uint32_t blocks_of(uint32_t rows) { return (rows + kListRows - 1) / kListRows; }

template <class T>
void launch_means(const HeadRows& from, uint32_t heads, uint32_t dim, void* to,
                  cudaStream_t stream) {
  const dim3 grid(blocks_of(from.rows), heads), block(dim / 2, kMeanLanes);
  mean_kernel<T>
      <<<grid, block, block.x * block.y * sizeof(float2), stream>>>(from, dim, static_cast<T*>(to));
  check_launch("means of rows");
}

template <class T, int wide>
void launch_product(const BlockedParams& a, const SampledWeights& w, const Means& means,
                    uint32_t dim, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(T) * 2 * (kQueryGroups + kBlocks) * kPitch<wide>;
  static_assert(kBytes <= size_t{99} << 10U);
  check(cudaFuncSetAttribute(mean_product_kernel<T, wide>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "shared memory of groups of queries");
  const dim3 grid((w.blocks + kBlocks - 1) / kBlocks, (w.samples + kQueryGroups - 1) / kQueryGroups,
                  a.q_heads);
  mean_product_kernel<T, wide><<<grid, kThreads, kBytes, stream>>>(a, w, means, dim);
  check_launch("weights of groups of queries");
}

template <class T>
void mean(const BlockedParams& a, const SampledWeights& w, const Means& means, uint32_t dim,
          cudaStream_t stream) {
  launch_means<T>({a.q, a.q_head_stride, a.q_token_stride, a.n}, a.q_heads, dim, means.queries,
                  stream);
  launch_means<T>({a.keys, a.head_stride, a.row_stride, a.rows}, a.kv_heads, dim, means.rows,
                  stream);
  switch (dim) {
    case 80: return launch_product<T, 80>(a, w, means, dim, stream);
    case 96: return launch_product<T, 96>(a, w, means, dim, stream);
    case 64:
    case 128:
    case 256: return launch_product<T, 64>(a, w, means, dim, stream);
    default:
      throw Error(Status::invalid_argument,
                  "groups of queries: head dimension " + std::to_string(dim));
  }
}

}  // namespace

void launch_mean_weights(const BlockedParams& piece, const SampledWeights& weights,
                         const Means& means, DType dtype, uint32_t head_dim, cudaStream_t stream) {
  dtype == DType::f16 ? mean<__half>(piece, weights, means, head_dim, stream)
                      : mean<__nv_bfloat16>(piece, weights, means, head_dim, stream);
}

}  // namespace keyhole::gpu
