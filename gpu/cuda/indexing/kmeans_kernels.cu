#include "gpu/cuda/indexing/kmeans_kernels.h"

#include <algorithm>

#include "gpu/cuda/indexing/plane_tiles.cuh"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kThreads = 256;
constexpr size_t kBytes = PlanePipeline::kBytes + 2 * kTileKeys * sizeof(float);
static_assert(kBytes <= size_t{99} << 10U);

__global__ void __launch_bounds__(kTileQueries, 1)
    assign_points(const uint16_t* points, uint32_t count, uint32_t dim, const uint16_t* centroids,
                  const float* offsets, uint32_t clusters, uint32_t* labels) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* tile_offsets = reinterpret_cast<float*>(shared + PlanePipeline::kBytes);
  const uint32_t t = threadIdx.x;
  const uint32_t first = blockIdx.x * kTileQueries;
  const uint32_t slices = dim / 16;
  const auto point_row = [&](uint32_t i) -> const uint16_t* {
    return first + i < count ? points + size_t{first + i} * slices * 48 : nullptr;
  };
  const auto centroid_row = [&](uint32_t tile, uint32_t i) -> const uint16_t* {
    const uint32_t c = tile * kTileKeys + i;
    return c < clusters ? centroids + size_t{c} * slices * 48 : nullptr;
  };
  // The rows and columns of Keeper.
  const uint32_t pair = t % 4 * 2;
  float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  uint32_t label[4] = {};
  stream_planes(shared, slices, (clusters + kTileKeys - 1) / kTileKeys, points, point_row,
                centroid_row, [&](float(&scores)[2][8][4], uint32_t tile) {
                  float* own = tile_offsets + tile % 2 * kTileKeys;
                  if (t < kTileKeys) {
                    const uint32_t c = tile * kTileKeys + t;
                    own[t] = c < clusters ? offsets[c] : INFINITY;  // never the nearest
                  }
                  __syncthreads();
#pragma unroll
                  for (uint32_t i = 0; i < 16; ++i) {
                    const uint32_t column = 8 * (i / 2) + i % 2 + pair;
                    const float offset = own[column];
#pragma unroll
                    for (uint32_t r = 0; r < 4; ++r) {
                      const float score = scores[r / 2][i / 2][r % 2 * 2 + i % 2] - offset;
                      if (score > best[r]) {
                        best[r] = score;
                        label[r] = tile * kTileKeys + column;
                      }
                    }
                  }
                });
#pragma unroll
  for (uint32_t r = 0; r < 4; ++r) {
    Rank rank = pack_rank(best[r], label[r]);
#pragma unroll
    for (uint32_t gap = 1; gap < 4; gap *= 2) {
      rank = max(rank, __shfl_xor_sync(kWholeWarp, rank, gap));
    }
    const uint32_t point = first + t / 32 * 32 + t % 32 / 4 + 8 * r;
    if (t % 4 == 0 && point < count) labels[point] = rank_key(rank);
  }
}

__global__ void find_largest(const float* numbers, size_t count, uint32_t* largest) {
  uint32_t found = 0;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += size_t{gridDim.x} * kThreads) {
    found = max(found, __float_as_uint(fabsf(numbers[i])));
  }
  found = __reduce_max_sync(kWholeWarp, found);
  if (threadIdx.x % 32 == 0) atomicMax(largest, found);
}

// A warp per point.
__global__ void accumulate_points(const uint16_t* points, uint32_t count, uint32_t dim,
                                  const uint32_t* labels, double scale, long long* sums,
                                  uint32_t* sizes) {
  const uint32_t point = (blockIdx.x * kThreads + threadIdx.x) / 32;
  if (point >= count) return;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t label = labels[point];
  const uint16_t* row = points + size_t{point} * dim * 3;
  const auto number = [](uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); };
  for (uint32_t j = lane; j < dim; j += 32) {
    const uint16_t* slice = row + j / 16 * 48 + j % 16;
    const float x = number(slice[0]) + (number(slice[16]) + number(slice[32]));
    const long long fixed = __double2ll_rn(static_cast<double>(x) * scale);
    atomicAdd(reinterpret_cast<unsigned long long*>(sums + size_t{label} * dim + j),
              static_cast<unsigned long long>(fixed));
  }
  if (lane == 0) atomicAdd(sizes + label, 1U);
}

}  // namespace

cudaError_t launch_assign(const uint16_t* points, uint32_t count, uint32_t dim,
                          const uint16_t* centroids, const float* offsets, uint32_t clusters,
                          uint32_t* labels, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      assign_points, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return error;
  assign_points<<<(count + kTileQueries - 1) / kTileQueries, kTileQueries, kBytes, stream>>>(
      points, count, dim, centroids, offsets, clusters, labels);
  return cudaGetLastError();
}

cudaError_t launch_largest(const float* numbers, size_t count, uint32_t* largest,
                           cudaStream_t stream) {
  const size_t blocks = std::min<size_t>((count + kThreads - 1) / kThreads, 512);
  find_largest<<<static_cast<uint32_t>(blocks), kThreads, 0, stream>>>(numbers, count, largest);
  return cudaGetLastError();
}

cudaError_t launch_accumulate(const uint16_t* points, uint32_t count, uint32_t dim,
                              const uint32_t* labels, double scale, long long* sums,
                              uint32_t* sizes, cudaStream_t stream) {
  const uint32_t warps = kThreads / 32;
  accumulate_points<<<(count + warps - 1) / warps, kThreads, 0, stream>>>(
      points, count, dim, labels, scale, sums, sizes);
  return cudaGetLastError();
}

}  // namespace keyhole::gpu
