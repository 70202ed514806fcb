// The choice of a tile's blocks, by one thread block for each tile of 128 queries and head: weights to shares of each
// sample's whole weight, their sum over the tile's samples, a histogram of these sums that says where the wanted mass
// is reached, and the list in rising order.
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/warp.cuh"
#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/ends.cuh"
#include "gpu/cuda/prefill/top_values.cuh"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;
// Bins of 1/8 of an octave down to 2^-32 of a sample's weight.
constexpr uint32_t kBins = 256;
constexpr float kBinsOfOctave = 8.0F;
constexpr float kAlone =
    8.0F;  ///< a sample is alone in a block where it has so many times the weight of any other
constexpr uint32_t kMostSamples = kListQueries;

struct Shared {
  float lse[kMostSamples];
  unsigned long long bins[kBins + 1];  ///< and what is attended anyhow
  uint32_t counts[kWarps];
  uint32_t last_bin;
  LargestKeysShared largest;
};

/// Shares in units that are added up exactly, in whatever order: the choice is the same every time.
__device__ inline unsigned long long in_units(float share) {
  constexpr float kUnits = 1099511627776.0F;  // 2^40
  return static_cast<unsigned long long>(share * kUnits);
}
/// The bin of a share of all samples together: 0 for 1, one more for each 1/8 of an octave less.
__device__ inline uint32_t bin_of(float share) {
  if (share <= 0.0F) return kBins - 1;
  const float place = -log2f(share) * kBinsOfOctave;
  return static_cast<uint32_t>(fminf(fmaxf(place, 0.0F), static_cast<float>(kBins - 1)));
}

__global__ void __launch_bounds__(kThreads)
    choose_kernel(const __grid_constant__ BlockedParams a, const __grid_constant__ SampledWeights w,
                  const __grid_constant__ BlockChoice c) {
  __shared__ Shared shared;
  const uint32_t tile = blockIdx.x, tiles = gridDim.x, head = blockIdx.y;
  if (!c.heads.has(head)) return;
  if (c.skips != nullptr && tile == 0 && threadIdx.x == 0) c.skips[head] = c.skip;
  const uint32_t first = tile * kListQueries, last = min(first + kListQueries, a.n) - 1;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t begin = blocked::Seen::by(a, first).from / kListRows;
  const uint32_t end = (blocked::Seen::by(a, last).to + kListRows - 1) / kListRows;
  const uint32_t own = (blocked::Seen::by(a, first).to - 1) / kListRows;
  const uint32_t near = (own > c.near_blocks ? own - c.near_blocks : 0) / c.unit * c.unit;
  // Whether the unit with this first block is attended anyhow: then all of its blocks are. Without a window the first
  // block that is seen is block 0.
  const auto is_kept = [&](uint32_t block) { return block < c.first_blocks || block >= near; };
  const uint32_t units = (end - begin + c.unit - 1) / c.unit;

  // Samples of the tile.
  float* shares = nullptr;
  LargestKeys most{};
  const auto key_at = [&](uint32_t i) {
    const uint32_t b = begin + i * c.unit;
    return is_kept(b) ? 0 : key_of(shares[b]);
  };
  if (w.weights != nullptr) {
    const uint32_t offset = w.query(a.n, 0);
    const uint32_t from = first <= offset ? 0 : (first - offset + w.stride - 1) / w.stride;
    float* const rows = w.weights + (size_t{head} * w.samples + from) * w.blocks;
    const uint32_t samples = (last - offset) / w.stride + 1 - from;
    for (uint32_t i = warp; i < samples; i += kWarps) {
      const float* const row = rows + size_t{i} * w.blocks;
      float top = kMinusInf;
      for (uint32_t b = begin + lane; b < end; b += 32) top = fmaxf(top, row[b]);
      top = finite_base(warp_max(top));
      float sum = 0.0F;
      for (uint32_t b = begin + lane; b < end; b += 32) sum += exp2f(row[b] - top);
      sum = warp_sum(sum);
      if (lane == 0) shared.lse[i] = top + log2f(sum);
    }
    for (uint32_t i = threadIdx.x; i <= kBins; i += kThreads) shared.bins[i] = 0;
    __syncthreads();
    // The tile's shares take the place of its first sample's weights. What is kept anyhow counts first.
    shares = rows;
    float looked_up = 0.0F;
    for (uint32_t u = threadIdx.x; u < units; u += kThreads) {
      const uint32_t first_block = begin + u * c.unit;
      const bool kept = is_kept(first_block);
      float of_unit = 0.0F;
      for (uint32_t b = first_block; b < min(first_block + c.unit, end); ++b) {
        float share = 0.0F, largest = 0.0F, second = 0.0F;
        for (uint32_t i = 0; i < samples; ++i) {
          const float x = exp2f(rows[size_t{i} * w.blocks + b] - shared.lse[i]);
          share += x;
          second = fmaxf(second, fminf(largest, x));
          largest = fmaxf(largest, x);
        }
        of_unit += share / static_cast<float>(samples);
        if (samples > 1 && !kept && largest > kAlone * second) looked_up += largest;
      }
      shares[first_block] = of_unit;
      atomicAdd(&shared.bins[kept ? kBins : bin_of(of_unit)], in_units(of_unit));
    }
    if (c.looked_up != nullptr) {
      looked_up = warp_sum(looked_up) / static_cast<float>(samples);
      if (lane == 0) atomicAdd(c.looked_up + head, in_units(looked_up));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned long long held = shared.bins[kBins];
      uint32_t bin = 0;
      while (bin < kBins && held < in_units(c.mass)) held += shared.bins[bin++];
      shared.last_bin = bin;  // bins below it are attended
    }
    __syncthreads();
    if (c.most_blocks != 0)
      most = largest_keys<kThreads>(units, c.most_blocks, key_at, shared.largest);
  }

  uint16_t* const list = c.lists + (size_t{head} * tiles + tile) * w.blocks;
  uint32_t count = 0, equals = 0;  // units
  for (uint32_t u0 = 0; u0 < units; u0 += kThreads) {
    const uint32_t u = u0 + threadIdx.x, b = begin + u * c.unit;
    bool keep = u < units && is_kept(b);
    if (shares != nullptr && c.most_blocks != 0) {
      const uint32_t key = u < units ? key_at(u) : 0;
      const bool is_equal = key != 0 && key == most.key;
      const uint32_t place = take_place(is_equal, shared.counts, equals);
      keep = keep || key > most.key || (is_equal && place < most.equal);
    } else if (u < units && shares != nullptr && !keep) {
      keep = bin_of(shares[b]) < shared.last_bin;
    }
    const uint32_t place = take_place(keep, shared.counts, count);
    if (!keep) continue;
    for (uint32_t i = 0; i < c.unit && b + i < end; ++i) {
      list[place * c.unit + i] = static_cast<uint16_t>(b + i);
    }
  }
  if (threadIdx.x != 0) return;
  // The last unit, which is near, may lack a block.
  count = count * c.unit - (units * c.unit - (end - begin));
  c.counts[size_t{head} * tiles + tile] = count;
  if (c.totals == nullptr) return;
  atomicAdd(c.totals, static_cast<unsigned long long>(count));
  atomicAdd(c.totals + 1, static_cast<unsigned long long>(end - begin));
}

/// All blocks for the heads that look up single rows.
__global__ void __launch_bounds__(kThreads)
    widen_kernel(const __grid_constant__ BlockedParams a, uint32_t blocks,
                 const __grid_constant__ BlockChoice c) {
  const uint32_t tile = blockIdx.x, tiles = gridDim.x, head = blockIdx.y;
  if (!c.heads.has(head) || c.looked_up[head] <= in_units(c.lookups) * tiles) return;
  const uint32_t first = tile * kListQueries, last = min(first + kListQueries, a.n) - 1;
  const uint32_t begin = blocked::Seen::by(a, first).from / kListRows;
  const uint32_t end = (blocked::Seen::by(a, last).to + kListRows - 1) / kListRows;
  const size_t at = size_t{head} * tiles + tile;
  for (uint32_t b = begin + threadIdx.x; b < end; b += kThreads)
    c.lists[at * blocks + b - begin] = static_cast<uint16_t>(b);
  if (threadIdx.x != 0) return;
  if (c.totals != nullptr)
    atomicAdd(c.totals, static_cast<unsigned long long>(end - begin - c.counts[at]));
  c.counts[at] = end - begin;
}

}  // namespace

void launch_choose_blocks(const BlockedParams& piece, const SampledWeights& samples,
                          const BlockChoice& choice, cudaStream_t stream) {
  const dim3 grid((piece.n + kListQueries - 1) / kListQueries, piece.q_heads);
  choose_kernel<<<grid, kThreads, 0, stream>>>(piece, samples, choice);
  check_launch("the choice of blocks");
  if (choice.lookups >= 1.0F || samples.weights == nullptr) return;
  widen_kernel<<<grid, kThreads, 0, stream>>>(piece, samples.blocks, choice);
  check_launch("the choice of blocks");
}

}  // namespace keyhole::gpu
