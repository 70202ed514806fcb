// What surrounds the tiles of scores: operands, thresholds, the selection of the best, the answer's form.
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/indexing/neighbour_epilogue.cuh"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kSorted = 1024;  // ranks that are sorted at once, 8 KiB

__device__ uint32_t warp_of_grid() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }

// ---- Thresholds ------------------------------------------------------------------------------------------

// A warp per query: the largest number such that at least `rank` of its maxima are as large, bit by bit.
__global__ void find_thresholds(const float* maxima, uint32_t rows, uint32_t groups, uint32_t rank,
                                Rank* thresholds) {
  constexpr uint32_t kEach = kMostGroups / 32;
  const uint32_t row = warp_of_grid();
  if (row >= rows) return;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t own[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t at = i * 32 + lane;
    own[i] = at < groups
                 ? static_cast<uint32_t>(pack_rank(maxima[size_t{row} * groups + at], 0) >> 32)
                 : 0;
  }
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = found | (1U << bit);
    uint32_t n = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) n += own[i] >= candidate ? 1 : 0;
    if (__reduce_add_sync(kWholeWarp, n) >= rank) found = candidate;
  }
  if (lane == 0) thresholds[row] = max(static_cast<Rank>(found) << 32, kLowestRank);
}

// ---- Merge -----------------------------------------------------------------------------------------------

// Sorts the first n ranks, best first: a bitonic network over the next power of two. Not cub::BlockRadixSort, which
// sorts a fixed number of keys, 1024 here, in 16 passes of 4 bits: with most = 100 some 350 are to be sorted
// (sample_rank()).
__device__ void sort_ranks(Rank* ranks, uint32_t n) {
  uint32_t size = 32;
  while (size < n) size *= 2;
  for (uint32_t i = n + threadIdx.x; i < size; i += kThreads) ranks[i] = 0;
  __syncthreads();
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t gap = run / 2; gap > 0; gap /= 2) {
      for (uint32_t i = threadIdx.x; i < size / 2; i += kThreads) {
        const uint32_t low = 2 * i - (i & (gap - 1));
        const uint32_t high = low + gap;
        const bool falling = (low & run) == 0;
        const Rank a = ranks[low];
        const Rank b = ranks[high];
        if ((a < b) == falling) {
          ranks[low] = b;
          ranks[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// A block per query.
__global__ void __launch_bounds__(kThreads) merge_lists(const MergeArgs args) {
  __shared__ Rank ranks[kSorted];
  __shared__ uint32_t sizes[kMostShares];
  const uint32_t count = args.chosen != nullptr ? *args.chosen_count : args.rows;
  const uint32_t t = threadIdx.x;
  for (uint32_t at = blockIdx.x; at < count; at += gridDim.x) {
    const uint32_t row = args.chosen != nullptr ? args.chosen[at] : at;
    const uint32_t limit = args.limits != nullptr ? args.limits[row] : ~0U;
    __syncthreads();
    // A query that sees nothing has no lists.
    for (uint32_t s = t; s < args.shares; s += kThreads) {
      sizes[s] = limit == 0 ? 0 : args.list_sizes[size_t{row} * args.shares + s];
    }
    uint32_t have = args.with_earlier ? args.best_sizes[row] : 0;
    Rank* const best = args.best + size_t{row} * args.most;
    for (uint32_t i = t; i < have; i += kThreads) ranks[i] = best[i];
    __syncthreads();
    uint32_t all = 0;
    for (uint32_t s = 0; s < args.shares;) {
      uint32_t filled = have;
      for (; s < args.shares && filled + sizes[s] <= kSorted; ++s) {
        const Rank* list = args.lists + (size_t{row} * args.shares + s) * kListCapacity;
        for (uint32_t i = t; i < sizes[s]; i += kThreads) ranks[filled + i] = list[i];
        filled += sizes[s];
        all += sizes[s];
      }
      sort_ranks(ranks, filled);
      have = min(filled, args.most);
    }
    for (uint32_t i = t; i < have; i += kThreads) best[i] = ranks[i];
    if (t != 0) continue;
    args.best_sizes[row] = have;
    args.thresholds[row] = have == args.most ? ranks[have - 1] : kLowestRank;
    atomicAdd(args.counters, static_cast<unsigned long long>(all));
    if (args.missed != nullptr && have < min(args.most, min(args.key_count, limit))) {
      atomicAdd(args.counters + 1, 1ULL);
      args.missed[atomicAdd(args.missed_count, 1U)] = row;
    }
  }
}

// ---- Answer, operands ------------------------------------------------------------------------------------

__global__ void unpack_ranks(const Rank* best, const uint32_t* best_sizes, const float* scales,
                             uint32_t rows, uint32_t most, uint32_t width, uint32_t* ids,
                             float* scores, uint32_t* counts) {
  const uint32_t row = warp_of_grid();
  if (row >= rows) return;
  const uint32_t n = min(best_sizes[row], width);
  const float scale = scales != nullptr ? scales[row] : 1.0F;
  for (uint32_t i = threadIdx.x % 32; i < n; i += 32) {
    const Rank rank = best[size_t{row} * most + i];
    ids[size_t{row} * width + i] = rank_key(rank);
    if (scores != nullptr) scores[size_t{row} * width + i] = rank_score(rank) * scale;
  }
  if (threadIdx.x % 32 == 0) counts[row] = n;
}

__device__ uint16_t as_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
__device__ float from_bf16(uint16_t x) { return __bfloat162float(__ushort_as_bfloat16(x)); }

// A warp per row.
__global__ void convert_rows(const std::byte* from, size_t stride, DType from_type, uint32_t rows,
                             uint32_t dim, DType to_type, uint16_t* to, float* scales,
                             float* extra) {
  const uint32_t row = warp_of_grid();
  if (row >= rows) return;
  const uint32_t lane = threadIdx.x % 32;
  const std::byte* in = from + row * stride;
  if (to_type == DType::f32) {
    uint16_t* out = to + size_t{row} * dim * 3;
    for (uint32_t i = lane; i < dim; i += 32) {
      const float x = load_element(in, from_type, i);
      uint16_t* slice = out + i / 16 * 48 + i % 16;
      const uint16_t high = as_bf16(x);
      const float rest = x - from_bf16(high);
      const uint16_t middle = as_bf16(rest);
      slice[0] = high;
      slice[16] = middle;
      slice[32] = as_bf16(rest - from_bf16(middle));
    }
    return;
  }
  float scale = 1.0F;
  if (scales != nullptr) {
    float largest = 0.0F;
    for (uint32_t i = lane; i < dim; i += 32)
      largest = fmaxf(largest, fabsf(load_element(in, from_type, i)));
    largest = warp_max(largest);
    // The power of two above it; an exponent that itself and its inverse have.
    const int exponent = largest > 0.0F ? min(max(ilogbf(largest) + 1, -120), 120) : 0;
    scale = ldexpf(1.0F, -exponent);
    if (lane == 0) {
      scales[row] = ldexpf(1.0F, exponent);
      if (extra != nullptr) extra[row] *= scale;
    }
  }
  for (uint32_t i = lane; i < dim; i += 32) {
    const float x = load_element(in, from_type, i) * scale;
    to[size_t{row} * dim + i] =
        to_type == DType::f16 ? __half_as_ushort(__float2half_rn(x)) : as_bf16(x);
  }
}

uint32_t blocks_of_warps(uint32_t rows) { return (rows + kThreads / 32 - 1) / (kThreads / 32); }

}  // namespace

cudaError_t launch_thresholds(const float* maxima, uint32_t rows, uint32_t groups, uint32_t rank,
                              Rank* thresholds, cudaStream_t stream) {
  find_thresholds<<<blocks_of_warps(rows), kThreads, 0, stream>>>(maxima, rows, groups, rank,
                                                                  thresholds);
  return cudaGetLastError();
}

cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream) {
  // Few are searched twice, if any.
  const uint32_t blocks = args.chosen != nullptr ? min(args.rows, 1024U) : args.rows;
  merge_lists<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const Rank* best, const uint32_t* best_sizes, const float* scales,
                          uint32_t rows, uint32_t most, uint32_t width, uint32_t* ids,
                          float* scores, uint32_t* counts, cudaStream_t stream) {
  unpack_ranks<<<blocks_of_warps(rows), kThreads, 0, stream>>>(best, best_sizes, scales, rows, most,
                                                               width, ids, scores, counts);
  return cudaGetLastError();
}

cudaError_t launch_convert(const TensorView& from, DType to_type, uint16_t* to, float* scales,
                           float* extra, cudaStream_t stream) {
  if (from.tokens == 0) return cudaSuccess;
  const auto rows = static_cast<uint32_t>(from.tokens);
  convert_rows<<<blocks_of_warps(rows), kThreads, 0, stream>>>(
      from.data, from.token_stride * dtype_size(from.dtype), from.dtype, rows, from.dim, to_type,
      to, scales, extra);
  return cudaGetLastError();
}

}  // namespace keyhole::gpu
