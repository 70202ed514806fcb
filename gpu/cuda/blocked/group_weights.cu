// A thread block has 128 groups of queries of a head and 64 groups of rows, and walks over their components 64 (80, 96) at a time:
// the products of blocked_kernel.cuh, whose sums over a block's groups need no order.
#include <string>

#include "gpu/cuda/blocked/blocked_kernel.cuh"
#include "gpu/cuda/blocked/group_weights.h"

namespace keyhole::gpu {
namespace {

using blocked::kPitch;
using blocked::kThreads;
using blocked::power_of_2;

constexpr int kTiles = 2;  ///< of 16 groups of queries of a warp
constexpr int kQueryGroups = blocked::kQueries<kTiles>, kRowGroups = 64;

/// Rows whose products are wanted: of a group there are `slices`, one after the other.
struct Groups {
  const void* data = nullptr;
  size_t head_stride = 0, row_stride = 0;  ///< elements
  uint32_t rows = 0;
};
struct GroupProduct {
  Groups queries, rows;
  uint32_t slices = 1;
};

/// in_block: groups of a block of kListRows rows, 1, 4 or 8. wide: components of a step.
template <class T, int wide, int in_block>
__global__ void __launch_bounds__(kThreads, 2)
    group_kernel(const __grid_constant__ BlockedParams a, const __grid_constant__ SampledWeights w,
                 const __grid_constant__ GroupProduct g, uint32_t dim) {
  constexpr uint32_t kUnit = kListRows / in_block;  ///< rows of a group
  constexpr uint32_t kBlocks = kRowGroups / in_block;
  constexpr int kStage = (kQueryGroups + kRowGroups) * kPitch<wide>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const stages = reinterpret_cast<T*>(memory);

  const uint32_t head = blockIdx.z, kv_head = head / (a.q_heads / a.kv_heads);
  if (!w.heads.has(head)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t first = blockIdx.y * kQueryGroups, first_row_group = blockIdx.x * kRowGroups;
  const uint32_t first_block = blockIdx.x * kBlocks;
  float* const weights = w.weights + size_t{head} * w.samples * w.blocks;
  // The position of a group's last query.
  const auto last_of = [&](uint32_t group) {
    return a.first + min((group + 1) * w.stride, a.n) - 1;
  };
  if (first_row_group * kUnit > last_of(min(first + kQueryGroups, w.samples) - 1)) {
    for (uint32_t i = threadIdx.x; i < kQueryGroups * kBlocks; i += kThreads) {
      const uint32_t group = first + i / kBlocks, block = first_block + i % kBlocks;
      if (group < w.samples && block < w.blocks)
        weights[size_t{group} * w.blocks + block] = kMinusInf;
    }
    return;
  }

  const T* const queries = static_cast<const T*>(g.queries.data) + head * g.queries.head_stride;
  const T* const rows = static_cast<const T*>(g.rows.data) + kv_head * g.rows.head_stride;
  const uint32_t pieces = dim / wide, steps = g.slices * pieces;
  const auto fetch = [&](uint32_t step) {
    const uint32_t slice = step / pieces, column = step % pieces * wide;
    // Slice number `slice` of a group of queries counts from its end: how many groups have one.
    const uint32_t mirrored = g.slices - 1 - slice;
    const uint32_t with_query = (g.queries.rows + slice) / g.slices;
    const uint32_t with_row = (g.rows.rows + mirrored) / g.slices;
    T* const to = stages + step % 2 * kStage;
    blocked::fetch_rows<wide, kQueryGroups>(to, queries + mirrored * g.queries.row_stride + column,
                                            g.slices * g.queries.row_stride, first, with_query);
    blocked::fetch_rows<wide, kRowGroups>(to + kQueryGroups * kPitch<wide>,
                                          rows + slice * g.rows.row_stride + column,
                                          g.slices * g.rows.row_stride, first_row_group, with_row);
    commit_copies();
  };
  fetch(0);
  const uint32_t q_lane =
      shared_address(stages + (warp * kTiles * 16 + lane % 16) * kPitch<wide> + lane / 16 * 8);
  const uint32_t k_lane = shared_address(
      stages + (kQueryGroups + lane / 16 * 8 + lane % 8) * kPitch<wide> + lane / 8 % 2 * 8);
  float s[kTiles][kRowGroups / 8][4] = {};
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
      for (int pair = 0; pair < kRowGroups / 16; ++pair) {
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

  const float scale = a.logits.scale / static_cast<float>(g.slices), cap = a.logits.softcap;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t group = first + (warp * kTiles + t) * 16 + lane / 4 + half * 8;
      const bool there = group < w.samples;
      const uint32_t last = last_of(min(group, w.samples - 1));
      float* const to = weights + size_t{group} * w.blocks;
#pragma unroll
      for (int n = 0; n < kRowGroups / 8; ++n) {
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[i] = scale * s[t][n][2 * half + i];
          if (cap > 0.0F) x[i] = cap * tanhf(x[i] / cap);
          x[i] *= kLog2E;
          const uint32_t row = (first_row_group + n * 8 + lane % 4 * 2 + i) * kUnit;
          if (row > last) x[i] = kMinusInf;
        }
        if constexpr (in_block == 1) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t block = first_block + n * 8 + lane % 4 * 2 + i;
            if (there && block < w.blocks) to[block] = x[i];
          }
        } else {
          // The lanes of a block: two of the row's four, or all.
          float largest = fmaxf(x[0], x[1]);
          largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, 1));
          if constexpr (in_block == 8)
            largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, 2));
          const float base = finite_base(largest);
          float sum = power_of_2(x[0] - base) + power_of_2(x[1] - base);
          sum += __shfl_xor_sync(kWholeWarp, sum, 1);
          if constexpr (in_block == 8) sum += __shfl_xor_sync(kWholeWarp, sum, 2);
          const uint32_t block = first_block + (n * 8 + lane % 4 * 2) / in_block;
          const bool writes = lane % 4 * 2 % in_block == 0;
          if (writes && there && block < w.blocks) to[block] = base + log2f(sum);
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
__global__ void mean_kernel(const __grid_constant__ Groups from, uint32_t dim, T* to) {
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
void launch_means(const Groups& from, uint32_t heads, uint32_t dim, void* to, cudaStream_t stream) {
  const dim3 grid(blocks_of(from.rows), heads), block(dim / 2, kMeanLanes);
  mean_kernel<T>
      <<<grid, block, block.x * block.y * sizeof(float2), stream>>>(from, dim, static_cast<T*>(to));
  check_launch("means of rows");
}

template <class T, int wide, int in_block>
void launch_product(const BlockedParams& a, const SampledWeights& w, const GroupProduct& g,
                    uint32_t dim, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(T) * 2 * (kQueryGroups + kRowGroups) * kPitch<wide>;
  check(cudaFuncSetAttribute(group_kernel<T, wide, in_block>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "shared memory of groups of queries");
  const dim3 grid((w.blocks * in_block + kRowGroups - 1) / kRowGroups,
                  (w.samples + kQueryGroups - 1) / kQueryGroups, a.q_heads);
  group_kernel<T, wide, in_block><<<grid, kThreads, kBytes, stream>>>(a, w, g, dim);
  check_launch("weights of groups of queries");
}
template <class T, int in_block>
void launch_wide(const BlockedParams& a, const SampledWeights& w, const GroupProduct& g,
                 uint32_t dim, cudaStream_t stream) {
  switch (dim) {
    case 80: return launch_product<T, 80, in_block>(a, w, g, dim, stream);
    case 96: return launch_product<T, 96, in_block>(a, w, g, dim, stream);
    case 64:
    case 128:
    case 256: return launch_product<T, 64, in_block>(a, w, g, dim, stream);
    default:
      throw Error(Status::invalid_argument,
                  "groups of queries: head dimension " + std::to_string(dim));
  }
}

template <class T>
void antidiagonal(const BlockedParams& a, const SampledWeights& w, uint32_t dim,
                  cudaStream_t stream) {
  GroupProduct g;
  g.queries = {a.q, a.q_head_stride, a.q_token_stride, a.n};
  g.rows = {a.keys, a.head_stride, a.row_stride, a.rows};
  g.slices = w.stride;
  switch (w.stride) {
    case 8: return launch_wide<T, 8>(a, w, g, dim, stream);
    case 16: return launch_wide<T, 4>(a, w, g, dim, stream);
    default:
      throw Error(Status::invalid_argument,
                  "antidiagonals: stride " + std::to_string(w.stride) + ", allowed: 8, 16");
  }
}

template <class T>
void mean(const BlockedParams& a, const SampledWeights& w, const Means& means, uint32_t dim,
          cudaStream_t stream) {
  launch_means<T>({a.q, a.q_head_stride, a.q_token_stride, a.n}, a.q_heads, dim, means.queries,
                  stream);
  launch_means<T>({a.keys, a.head_stride, a.row_stride, a.rows}, a.kv_heads, dim, means.rows,
                  stream);
  GroupProduct g;
  g.queries = {means.queries, size_t{w.samples} * dim, dim, w.samples};
  g.rows = {means.rows, size_t{w.blocks} * dim, dim, w.blocks};
  launch_wide<T, 1>(a, w, g, dim, stream);
}

}  // namespace

void launch_antidiagonal_weights(const BlockedParams& piece, const SampledWeights& weights,
                                 DType dtype, uint32_t head_dim, cudaStream_t stream) {
  dtype == DType::f16 ? antidiagonal<__half>(piece, weights, head_dim, stream)
                      : antidiagonal<__nv_bfloat16>(piece, weights, head_dim, stream);
}

void launch_mean_weights(const BlockedParams& piece, const SampledWeights& weights,
                         const Means& means, DType dtype, uint32_t head_dim, cudaStream_t stream) {
  dtype == DType::f16 ? mean<__half>(piece, weights, means, head_dim, stream)
                      : mean<__nv_bfloat16>(piece, weights, means, head_dim, stream);
}

}  // namespace keyhole::gpu
