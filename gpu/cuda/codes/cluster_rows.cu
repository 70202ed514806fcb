// k-means of the keys of a stretch of rows in the balanced space of their head, for lists (make_lists.h): a thread
// block of the products has 256 rows and all centroids, so that a row's nearest one is known at its end. Rows are then
// sorted by cluster, which makes the means without atomic sums: the same bits in every run.
//
// Keys and centroids are fp16 in the products. That decides in which list a row near a border comes, nothing else:
// means and codes are made of the rows as they are.
#include <cuda_fp16.h>

#include <cmath>

#include "gpu/cuda/codes/encode_rows.cuh"
#include "gpu/cuda/codes/int8_rows.cuh"
#include "gpu/cuda/codes/make_lists.h"
#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/tensor_core.cuh"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kMostOfLane = kMostListDim / 32;  // components of a row

constexpr uint32_t kAssignThreads = 512;  // 16 rows a warp
constexpr uint32_t kAssignRows = kAssignThreads / 32 * 16;
static_assert(kAssignRows == kCodeBlock, "the rows of a thread block have one scale");
constexpr uint32_t kMostClusters = kListStretch / kFewestListRows;
constexpr uint32_t kTileClusters = 8;  // columns of a product
constexpr uint32_t kMeanWarps = 8;
constexpr uint32_t kMeanRows = 512;  // more do not move a centroid noticeably
constexpr uint32_t kPlaceThreads = 1024;
static_assert(kMostClusters <= kPlaceThreads, "a thread has a cluster");

[[nodiscard]] __host__ __device__ constexpr uint32_t cluster_tiles(uint32_t clusters) {
  return (clusters + kTileClusters - 1) / kTileClusters;
}

// ---- Rows ----------------------------------------------------------------------------------------

constexpr uint32_t kCopyThreads = 512;
constexpr uint32_t kCopyBlocks = 2;  // of a head's K or V: the bus takes no more
constexpr uint32_t kCopiesAtOnce = 4;

/// Grid (thread blocks, heads, K or V).
__global__ void __launch_bounds__(kCopyThreads) copy_rows(const __grid_constant__ MakeLists p) {
  const bool is_keys = blockIdx.z == 0;
  const uint32_t head = blockIdx.y;
  const size_t bytes = size_t{p.rows} * p.row_bytes;
  const auto* const from = reinterpret_cast<const uint4*>((is_keys ? p.host_keys : p.host_values) +
                                                          (p.first_head + head) * p.rows_stride +
                                                          size_t{p.first_row} * p.row_bytes);
  auto* const to = reinterpret_cast<uint4*>((is_keys ? p.keys : p.values) + head * bytes);
  const size_t n = bytes / 16;
  constexpr uint32_t kStep = kCopyBlocks * kCopyThreads;
  for (size_t i = blockIdx.x * kCopyThreads + threadIdx.x; i < n; i += kStep * kCopiesAtOnce) {
    uint4 x[kCopiesAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kCopiesAtOnce; ++k) {
      if (i + k * kStep < n) x[k] = from[i + k * kStep];
    }
#pragma unroll
    for (uint32_t k = 0; k < kCopiesAtOnce; ++k) {
      if (i + k * kStep < n) to[i + k * kStep] = x[k];
    }
  }
}

/// The balanced keys of a head.
struct BalancedKeys {
  const std::byte* keys;
  const float* key_scale;
  const uint16_t* row_scales;  // of the stretch's first block
  uint32_t row_bytes, block_scales;
  DType dtype;

  __device__ BalancedKeys(const MakeLists& p, uint32_t head)
      : keys(p.keys + size_t{head} * p.rows * p.row_bytes),
        key_scale(p.key_scale + size_t{p.first_head + head} * p.shape.dim),
        row_scales(nullptr),
        row_bytes(p.row_bytes),
        block_scales(p.kv_heads * 2 * p.shape.dim),
        dtype(p.dtype) {
    if (p.row_scales == nullptr) return;
    row_scales = p.row_scales + size_t{p.first_row / kCodeBlock} * block_scales +
                 size_t{p.first_head + head} * 2 * p.shape.dim;
  }
  /// Component j of a row of the stretch, within the range of fp16.
  [[nodiscard]] __device__ float at(uint32_t row, uint32_t j) const {
    constexpr float kMost = 60000.0F;
    float x = codes::load_number(keys + size_t{row} * row_bytes, dtype, j) * __ldg(key_scale + j);
    if (row_scales != nullptr) {
      x *= codes::scale_of(row_scales[size_t{row / kCodeBlock} * block_scales + j]);
    }
    return fminf(fmaxf(x, -kMost), kMost);
  }
};

// ---- Centroids -----------------------------------------------------------------------------------

/// Where component j of a centroid lies among those of its head, as the second operand of a product has it.
__device__ uint32_t centroid_place(uint32_t cluster, uint32_t j, uint32_t dim) {
  const uint32_t tile = cluster / kTileClusters, lane = cluster % kTileClusters * 4 + j % 8 / 2;
  return ((tile * (dim / 16) + j / 16) * 32 + lane) * 4 + j % 16 / 8 * 2 + j % 2;
}

/// One warp writes a centroid, of which a lane has every 32nd component.
__device__ void put_centroid(const MakeLists& p, uint32_t head, uint32_t cluster,
                             const float (&x)[kMostOfLane]) {
  const uint32_t dim = p.shape.dim, lane = threadIdx.x % 32;
  const uint32_t tiles = cluster_tiles(p.stretch.clusters);
  auto* const out =
      reinterpret_cast<__half*>(p.centroids) + size_t{head} * tiles * kTileClusters * dim;
  float square = 0.0F;
#pragma unroll
  for (uint32_t i = 0; i < kMostOfLane; ++i) {
    const uint32_t j = lane + 32 * i;
    if (j >= dim) continue;
    const __half rounded = __float2half_rn(x[i]);
    out[centroid_place(cluster, j, dim)] = rounded;
    square += __half2float(rounded) * __half2float(rounded);
  }
  square = warp_sum(square);
  if (lane != 0) return;
  // What fills the last tile up is never the nearest.
  p.offsets[size_t{head} * tiles * kTileClusters + cluster] =
      cluster < p.stretch.clusters ? 0.5F * square : INFINITY;
}

/// The first centroids: a row of each of as many parts of the text, some row of it. Grid (tiles, heads), a warp a
/// centroid.
__global__ void __launch_bounds__(kTileClusters * 32)
    pick_centroids(const __grid_constant__ MakeLists p) {
  const uint32_t head = blockIdx.y, lane = threadIdx.x % 32;
  const uint32_t cluster = blockIdx.x * kTileClusters + threadIdx.x / 32;
  const uint32_t clusters = p.stretch.clusters;
  const BalancedKeys keys(p, head);
  float x[kMostOfLane] = {};
  if (cluster < clusters) {
    const auto begin = static_cast<uint32_t>(uint64_t{p.rows} * cluster / clusters);
    const auto end = static_cast<uint32_t>(uint64_t{p.rows} * (cluster + 1) / clusters);
    uint32_t hash = (cluster + 1) * 0x9E3779B1U;
    hash ^= hash >> 15U;
    const uint32_t row = begin + hash % max(end - begin, 1U);
#pragma unroll
    for (uint32_t i = 0; i < kMostOfLane; ++i) {
      if (lane + 32 * i < p.shape.dim) x[i] = keys.at(row, lane + 32 * i);
    }
  }
  put_centroid(p, head, cluster, x);
}

/// Each centroid becomes the mean of its rows; one without rows stays where it is. Grid (clusters, heads).
__global__ void __launch_bounds__(kMeanWarps * 32)
    move_centroids(const __grid_constant__ MakeLists p) {
  __shared__ float sums[kMeanWarps][kMostListDim];
  const uint32_t head = blockIdx.y, cluster = blockIdx.x, dim = p.shape.dim;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t* const starts = p.starts + size_t{head} * (p.stretch.clusters + 1);
  const uint32_t begin = starts[cluster], all = starts[cluster + 1] - begin;
  if (all == 0) return;
  const uint16_t* const order = p.order + size_t{head} * p.rows + begin;
  const uint32_t used = min(all, kMeanRows);
  const BalancedKeys keys(p, head);
  constexpr uint32_t kAtOnce = 4;
  float x[kMostOfLane] = {};
  for (uint32_t first = warp; first < used; first += kMeanWarps * kAtOnce) {
    uint32_t rows[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = min(first + k * kMeanWarps, used - 1);
      rows[k] = order[used == all ? i : static_cast<uint32_t>(uint64_t{all} * i / used)];
    }
#pragma unroll
    for (uint32_t i = 0; i < kMostOfLane; ++i) {
      const uint32_t j = lane + 32 * i;
      if (j >= dim) continue;
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        const float of_row = keys.at(rows[k], j);
        x[i] += first + k * kMeanWarps < used ? of_row : 0.0F;
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kMostOfLane; ++i) {
    if (lane + 32 * i < dim) sums[warp][lane + 32 * i] = x[i];
  }
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (uint32_t i = 0; i < kMostOfLane; ++i) {
    const uint32_t j = lane + 32 * i;
    if (j >= dim) continue;
    float sum = 0.0F;
    for (uint32_t w = 0; w < kMeanWarps; ++w) sum += sums[w][j];
    x[i] = sum / static_cast<float>(used);
  }
  put_centroid(p, head, cluster, x);
}

// ---- The nearest centroid ------------------------------------------------------------------------

/// Labels rows, and counts how many of these 256 each cluster has. Grid (256 rows each, heads).
template <uint32_t kDim>
__global__ void __launch_bounds__(kAssignThreads) assign_rows(const __grid_constant__ MakeLists p) {
  constexpr uint32_t kSlices = kDim / 16;
  // Tiles of centroids in shared memory at a time, 16 KiB, twice.
  constexpr uint32_t kTiles = 16384 / (kTileClusters * kDim * 2);
  constexpr uint32_t kTileBytes = kTileClusters * kDim * 2;
  __shared__ __align__(16) std::byte stage[2][kTiles * kTileBytes];
  __shared__ uint32_t counts[kMostClusters];
  const uint32_t head = blockIdx.y, t = threadIdx.x, lane = t % 32;
  const uint32_t clusters = p.stretch.clusters, tiles = cluster_tiles(clusters);
  const auto* const centroids =
      reinterpret_cast<const std::byte*>(p.centroids) + size_t{head} * tiles * kTileBytes;
  const float* const offsets = p.offsets + size_t{head} * tiles * kTileClusters;

  const auto load = [&](uint32_t first) {
    const uint32_t bytes = min(kTiles, tiles - first) * kTileBytes;
    std::byte* const to = stage[first / kTiles % 2];
    for (uint32_t at = t * 16; at < bytes; at += kAssignThreads * 16) {
      copy_async(shared_address(to + at), centroids + size_t{first} * kTileBytes + at, true);
    }
    commit_copies();
  };
  load(0);
  for (uint32_t c = t; c < clusters; c += kAssignThreads) counts[c] = 0;

  const uint32_t first_row = blockIdx.x * kAssignRows + t / 32 * 16;
  const BalancedKeys keys(p, head);
  const uint32_t row = first_row + lane / 4;
  uint32_t a[kSlices][4];
#pragma unroll
  for (uint32_t s = 0; s < kSlices; ++s) {
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) {
      const uint32_t of = row + r % 2 * 8, j = s * 16 + lane % 4 * 2 + r / 2 * 8;
      const __half2 two = __floats2half2_rn(keys.at(of, j), keys.at(of, j + 1));
      a[s][r] = packed(__low2half(two), __high2half(two));
    }
  }

  float best[2] = {-INFINITY, -INFINITY};
  uint32_t label[2] = {0, 0};
  for (uint32_t first = 0; first < tiles; first += kTiles) {
    __syncthreads();  // all have read what the next load replaces
    if (first + kTiles < tiles) {
      load(first + kTiles);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const auto* const b = reinterpret_cast<const uint2*>(stage[first / kTiles % 2]);
    const uint32_t here = min(kTiles, tiles - first);
#pragma unroll 2
    for (uint32_t i = 0; i < here; ++i) {
      float scores[4] = {};
#pragma unroll
      for (uint32_t s = 0; s < kSlices; ++s) {
        const uint2 two = b[(i * kSlices + s) * 32 + lane];
        multiply_add<__half>(scores, a[s], two.x, two.y);
      }
      const uint32_t column = (first + i) * kTileClusters + lane % 4 * 2;
      const float2 half_squares = __ldg(reinterpret_cast<const float2*>(offsets + column));
#pragma unroll
      for (uint32_t r = 0; r < 2; ++r) {
        const float x = scores[2 * r] - half_squares.x, y = scores[2 * r + 1] - half_squares.y;
        if (x > best[r]) best[r] = x, label[r] = column;
        if (y > best[r]) best[r] = y, label[r] = column + 1;
      }
    }
  }
#pragma unroll
  for (uint32_t r = 0; r < 2; ++r) {
#pragma unroll
    for (uint32_t gap = 1; gap < 4; gap *= 2) {
      const float other = __shfl_xor_sync(kWholeWarp, best[r], gap);
      const uint32_t of_other = __shfl_xor_sync(kWholeWarp, label[r], gap);
      if (other > best[r] || (other == best[r] && of_other < label[r])) {
        best[r] = other, label[r] = of_other;
      }
    }
    if (lane % 4 != 0) continue;
    p.labels[size_t{head} * p.rows + row + 8 * r] = static_cast<uint16_t>(label[r]);
    atomicAdd(&counts[label[r]], 1U);
  }
  __syncthreads();
  uint16_t* const out = p.counts + (size_t{head} * (p.rows / kAssignRows) + blockIdx.x) * clusters;
  for (uint32_t c = t; c < clusters; c += kAssignThreads) out[c] = static_cast<uint16_t>(counts[c]);
}

// ---- Rows by cluster -----------------------------------------------------------------------------

/// Sums x over the threads before this one; total: of all threads. By a whole thread block of kPlaceThreads.
__device__ uint32_t sum_before(uint32_t x, uint32_t (&of_warps)[kPlaceThreads / 32],
                               uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = x;
#pragma unroll
  for (uint32_t gap = 1; gap < 32; gap *= 2) {
    const uint32_t other = __shfl_up_sync(kWholeWarp, sum, gap);
    if (lane >= gap) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
  for (uint32_t w = 0; w < kPlaceThreads / 32; ++w) {
    if (w < warp) before += of_warps[w];
    total += of_warps[w];
  }
  __syncthreads();
  return before + sum - x;
}

/// Where each cluster begins, and how many of its rows lie in the 256s before each. A thread block a head.
__global__ void __launch_bounds__(kPlaceThreads)
    place_clusters(const __grid_constant__ MakeLists p) {
  __shared__ uint32_t of_warps[kPlaceThreads / 32];
  const uint32_t head = blockIdx.x, cluster = threadIdx.x;
  const uint32_t clusters = p.stretch.clusters, parts = p.rows / kAssignRows;
  uint16_t* const counts = p.counts + size_t{head} * parts * clusters + cluster;
  uint32_t size = 0;
  if (cluster < clusters) {
    constexpr uint32_t kAtOnce = 16;
    for (uint32_t first = 0; first < parts; first += kAtOnce) {
      uint32_t n[kAtOnce];
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        n[k] = first + k < parts ? counts[size_t{first + k} * clusters] : 0;
      }
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        if (first + k < parts) counts[size_t{first + k} * clusters] = static_cast<uint16_t>(size);
        size += n[k];
      }
    }
  }
  uint32_t total = 0;
  const uint32_t start = sum_before(size, of_warps, total);
  uint32_t* const starts = p.starts + size_t{head} * (clusters + 1);
  if (cluster < clusters) starts[cluster] = start;
  if (cluster == 0) starts[clusters] = total;
}

/// Sorts rows by cluster, those of one in the order of the text. Grid (256 rows each, heads).
__global__ void __launch_bounds__(kAssignRows) order_rows(const __grid_constant__ MakeLists p) {
  __shared__ uint32_t labels[kAssignRows];
  const uint32_t head = blockIdx.y, t = threadIdx.x, row = blockIdx.x * kAssignRows + t;
  const uint32_t clusters = p.stretch.clusters;
  const uint32_t label = p.labels[size_t{head} * p.rows + row];
  labels[t] = label;
  __syncthreads();
  uint32_t rank = __popc(__match_any_sync(kWholeWarp, label) & ((1U << t % 32) - 1));
  for (uint32_t i = 0; i < t / 32 * 32; ++i) rank += labels[i] == label ? 1 : 0;
  const uint32_t before =
      p.counts[(size_t{head} * (p.rows / kAssignRows) + blockIdx.x) * clusters + label];
  const uint32_t start = p.starts[size_t{head} * (clusters + 1) + label];
  p.order[size_t{head} * p.rows + start + before + rank] = static_cast<uint16_t>(row);
}

void launch_assign_rows(const MakeLists& p, cudaStream_t stream) {
  const dim3 grid(p.rows / kAssignRows, p.heads);
  switch (p.shape.dim) {
    case 64: assign_rows<64><<<grid, kAssignThreads, 0, stream>>>(p); break;
    case 80: assign_rows<80><<<grid, kAssignThreads, 0, stream>>>(p); break;
    case 96: assign_rows<96><<<grid, kAssignThreads, 0, stream>>>(p); break;
    case 128: assign_rows<128><<<grid, kAssignThreads, 0, stream>>>(p); break;
    default: assign_rows<256><<<grid, kAssignThreads, 0, stream>>>(p); break;
  }
  check_launch("assigning rows to clusters");
  place_clusters<<<p.heads, kPlaceThreads, 0, stream>>>(p);
  check_launch("sorting rows by cluster");
  order_rows<<<grid, kAssignRows, 0, stream>>>(p);
  check_launch("sorting rows by cluster");
}

}  // namespace

void launch_copy_rows(const MakeLists& p, cudaStream_t stream) {
  copy_rows<<<dim3(kCopyBlocks, p.heads, 2), kCopyThreads, 0, stream>>>(p);
  check_launch("copying rows for lists");
}

void launch_cluster_rows(const MakeLists& p, cudaStream_t stream) {
  const dim3 tiles(cluster_tiles(p.stretch.clusters), p.heads);
  pick_centroids<<<tiles, kTileClusters * 32, 0, stream>>>(p);
  check_launch("choosing centroids");
  launch_assign_rows(p, stream);
  for (uint32_t i = 0; i < p.iterations; ++i) {
    move_centroids<<<dim3(p.stretch.clusters, p.heads), kMeanWarps * 32, 0, stream>>>(p);
    check_launch("moving centroids");
    launch_assign_rows(p, stream);
  }
}

}  // namespace keyhole::gpu
