// Which blocks of codes a tile of query rows attends: those whose mean key weighs most for the mean of one of its query
// heads.
#include <cstddef>
#include <cstdint>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/warp.cuh"
#include "gpu/cuda/prefill/coded_kernels.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kChoiceThreads = 512, kChoiceWarps = kChoiceThreads / 32;
constexpr uint32_t kChoiceHeads = 16;  ///< most query heads of a KV head
constexpr uint32_t kChoiceDim = 256;
/// As many blocks as a layer of codes may have (gpu/codes_layout.cpp). A weight is kept for every one, in shared memory
/// beside the kernel's own, which is less than kOwnShared.
constexpr uint32_t kMostChoiceBlocks = 16384;
constexpr size_t kMostWeightBytes = kMostChoiceBlocks * sizeof(uint32_t);
constexpr size_t kOwnShared = size_t{20} << 10U;
static_assert(kMostWeightBytes + kOwnShared <= size_t{99} << 10U);  // 8.6, 8.9 and 12.0

/// The order of floats as that of unsigned numbers.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// Sum over the thread block, for all threads.
__device__ uint32_t block_sum(uint32_t x, uint32_t* of_warps) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kWholeWarp, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  uint32_t all = 0;
  for (uint32_t w = 0; w < kChoiceWarps; ++w) all += of_warps[w];
  return all;
}

/// Grid (tiles, KV heads).
__global__ void __launch_bounds__(kChoiceThreads)
    choose_coded(const __grid_constant__ CodedParams a, uint32_t* chosen) {
  extern __shared__ uint32_t weights[];  // [blocks]
  __shared__ float means[kChoiceHeads][kChoiceDim];
  __shared__ float2 sums[kChoiceHeads][kChoiceWarps];
  __shared__ float lse[kChoiceHeads];
  __shared__ uint32_t of_warps[kChoiceWarps];
  static_assert(sizeof means + sizeof sums + sizeof lse + sizeof of_warps <= kOwnShared);
  const uint32_t kv_head = blockIdx.y, first = blockIdx.x * kCodedQueries;
  const uint32_t dim = a.rows.code.dim, columns = coded_columns(dim), blocks = a.rows.blocks;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t rows = min(kCodedQueries, max(a.n * a.group, first) - first);

  // Means of the tile's queries, head by head: a product with them is a logit in base 2 (before a soft-cap a natural
  // one).
  const size_t tile_at = size_t{kv_head} * a.padded + first;
  for (uint32_t i = threadIdx.x; i < a.group * dim; i += kChoiceThreads) {
    const uint32_t head = i / dim, j = i % dim;
    float sum = 0.0F;
    uint32_t count = 0;
    for (uint32_t r = (head + a.group - first % a.group) % a.group; r < rows; r += a.group) {
      sum = fmaf(__half2float(a.q[(tile_at + r) * columns + j]), a.queries[tile_at + r].unit, sum);
      ++count;
    }
    means[head][j] = count == 0 ? 0.0F : sum / static_cast<float>(count);
  }
  __syncthreads();

  const std::byte* const base =
      a.rows.blocks_at + kv_head * a.rows.head_stride + a.rows.code.key_mean_at();
  // Logits of a block's mean, for all heads: use(head, logit).
  const auto score = [&](uint32_t block, const auto& use) {
    float products[kChoiceHeads] = {};
    const auto* const key = reinterpret_cast<const uint4*>(base + block * a.rows.block_stride);
    for (uint32_t piece = 0; piece < dim / 8; ++piece) {
      const uint4 eight = __ldg(key + piece);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(words + w));
        const uint32_t j = 8 * piece + 2 * w;
#pragma unroll
        for (uint32_t h = 0; h < kChoiceHeads; ++h) {
          if (h >= a.group) break;
          products[h] = fmaf(two.x, means[h][j], fmaf(two.y, means[h][j + 1], products[h]));
        }
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kChoiceHeads; ++h) {
      if (h < a.group) use(h, products[h]);
    }
  };

  float top[kChoiceHeads], total[kChoiceHeads];
#pragma unroll
  for (uint32_t h = 0; h < kChoiceHeads; ++h) top[h] = kMinusInf, total[h] = 0.0F;
  for (uint32_t block = threadIdx.x; block < blocks; block += kChoiceThreads) {
    score(block, [&](uint32_t h, float x) {
      const float now = fmaxf(top[h], x);
      total[h] = total[h] * exp2f(top[h] - now) + exp2f(x - now);
      top[h] = now;
    });
  }
#pragma unroll
  for (uint32_t h = 0; h < kChoiceHeads; ++h) {
    if (h >= a.group) break;
    const float all = warp_max(top[h]);
    const float sum = warp_sum(all > kMinusInf ? total[h] * exp2f(top[h] - all) : 0.0F);
    if (lane == 0) sums[h][warp] = make_float2(all, sum);
  }
  __syncthreads();
  if (threadIdx.x < a.group) {
    float all = kMinusInf, sum = 0.0F;
    for (uint32_t w = 0; w < kChoiceWarps; ++w) all = fmaxf(all, sums[threadIdx.x][w].x);
    for (uint32_t w = 0; w < kChoiceWarps; ++w) {
      const float2 s = sums[threadIdx.x][w];
      if (s.y > 0.0F) sum = fmaf(s.y, exp2f(s.x - all), sum);
    }
    lse[threadIdx.x] = all + log2f(sum);
  }
  __syncthreads();
  // A block is worth what the head gives it that gives it most.
  for (uint32_t block = threadIdx.x; block < blocks; block += kChoiceThreads) {
    float share = kMinusInf;
    score(block, [&](uint32_t h, float x) { share = fmaxf(share, x - lse[h]); });
    weights[block] = block + kNewestBlocks >= blocks ? ~0U : ordered(share);
  }
  __syncthreads();

  // The largest number that as many blocks reach as are chosen, or more.
  uint32_t least = 0;
  for (uint32_t bit = 1U << 31U; bit != 0; bit >>= 1U) {
    uint32_t count = 0;
    for (uint32_t block = threadIdx.x; block < blocks; block += kChoiceThreads) {
      count += weights[block] >= (least | bit) ? 1 : 0;
    }
    if (block_sum(count, of_warps) >= a.chosen_blocks) least |= bit;
  }
  uint32_t above = 0;
  for (uint32_t block = threadIdx.x; block < blocks; block += kChoiceThreads) {
    above += weights[block] > least ? 1 : 0;
  }
  uint32_t equal = a.chosen_blocks - block_sum(above, of_warps);  // of those that are still taken
  uint32_t* const to = chosen + (size_t{kv_head} * gridDim.x + blockIdx.x) * a.chosen_blocks;
  uint32_t written = 0;
  for (uint32_t begin = 0; begin < blocks; begin += kChoiceThreads) {
    const uint32_t block = begin + threadIdx.x;
    const bool is_above = block < blocks && weights[block] > least;
    const bool is_equal = block < blocks && weights[block] == least;
    // How many before this thread's block are above, and equal: both counts in one number.
    const uint32_t own = (is_above ? 1U : 0U) | (is_equal ? 1U << 16U : 0U);
    uint32_t before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kWholeWarp, before, step);
      if (static_cast<int>(lane) >= step) before += other;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = before;
    __syncthreads();
    uint32_t all = 0;
    before -= own;
    for (uint32_t w = 0; w < kChoiceWarps; ++w) {
      if (w < warp) before += of_warps[w];
      all += of_warps[w];
    }
    const uint32_t equal_before = before >> 16U, taken_before = min(equal_before, equal);
    if (is_above || (is_equal && equal_before < equal)) {
      to[written + (before & 0xFFFFU) + taken_before] = block;
    }
    const uint32_t taken = min(all >> 16U, equal);
    written += (all & 0xFFFFU) + taken;
    equal -= taken;
  }
}

}  // namespace

bool can_choose_coded(uint32_t blocks, uint32_t group) {
  return blocks <= kMostChoiceBlocks && group <= kChoiceHeads;
}

void launch_coded_choice(const CodedParams& a, uint32_t* chosen, cudaStream_t stream) {
  // The most of any call: the limit is the function's, whichever thread sets it between this and a launch.
  check(cudaFuncSetAttribute(choose_coded, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kMostWeightBytes)),
        "shared memory of a choice of codes");
  choose_coded<<<dim3(a.padded / kCodedQueries, a.rows.kv_heads), kChoiceThreads,
                 a.rows.blocks * sizeof(uint32_t), stream>>>(a, chosen);
  check_launch("a choice of codes");
}

}  // namespace keyhole::gpu
