// Scores the partitions of a layer and chooses the best ones of each KV head, in one launch, on every GPU. Grid (tiles,
// KV heads). Reads q `[q_heads, dim]`, codes `[kv_heads, capacity, dim]`; writes weights
// `[kv_heads, capacity, padded]`, factors, chosen_bits, ids, log_sums (base 2). A block scores kPartitionTile
// partitions of a KV head; the block that finishes last for it knows the sums of weights, selects and publishes. Where
// blocks can form clusters, gpu/cuda/partitions/choose_cluster.cu does the same in half the time.
#include "gpu/cuda/partitions/group.cuh"
#include "gpu/cuda/partitions/score.cuh"
#include "gpu/cuda/partitions/select.cuh"

namespace keyhole::gpu {

namespace {

constexpr uint32_t kWarps = 16;
constexpr uint32_t kThreads = 32 * kWarps;
static_assert(kThreads == kPartitionTile && kThreads == kBins && kThreads % kMaxDeviceGroup == 0);

constexpr uint32_t kKeysInShared = 8192;
constexpr uint32_t kFactorsInShared = 512;

struct Tile {
  Scoring<kWarps> scoring;
  float logs[kPartitionTile * kMaxDeviceGroup];
};

struct Choice {
  uint32_t keys[kKeysInShared];
  uint32_t bits[kKeysInShared / 32];
  float factors[kFactorsInShared];
  Selecting<kWarps> selecting;
};

union Shared {
  Tile tile;
  Choice choice;
};

/// Weights of a tile, and their sums.
template <uint32_t D>
__device__ void score_tile(Tile& s, const PartitionsLayer& l, const DeviceRows& q, uint32_t kv_head,
                           uint32_t tile, const PartitionsHead& head) {
  const uint32_t first = tile * kPartitionTile;
  const uint32_t rows = min(head.count - first, kPartitionTile);
  score_rows<D, kWarps>(s.scoring, s.logs, l, q, kv_head, head, first, rows);
  __syncthreads();
  // From here on a thread belongs to one head: kThreads is a multiple of `padded`.
  const uint32_t h = threadIdx.x % l.padded;
  const float shift = largest_of(s.scoring, h);
  __syncthreads();
  float* weights = l.weights + (size_t{kv_head} * l.capacity + first) * l.padded;
  const float by = finite_base(shift);
  float sum = 0.0F;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < rows * l.padded; i += kThreads) {
    const float weight = exp2f(s.logs[i] - by);
    weights[i] = weight;
    sum += weight;
  }
  sum = sum_of_head(s.scoring, sum, l.padded);
  if (threadIdx.x >= l.padded) return;
  const size_t at = (size_t{kv_head} * (l.capacity / kPartitionTile) + tile) * l.padded;
  l.tile_states[at + threadIdx.x] = {shift, sum};
}

/// Sums of weights of all heads, and the factors that make shares of weights.
__device__ void normalise(const PartitionsLayer& l, uint32_t kv_head, uint32_t tiles,
                          float* factors) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t h = threadIdx.x / 32;
  if (h >= l.padded) return;
  const size_t base = size_t{kv_head} * (l.capacity / kPartitionTile) * l.padded + h;
  AttentionState own = AttentionState::empty();
  for (uint32_t t = lane; t < tiles; t += 32) {
    own.merge(AttentionState::from_l2(l.tile_states + base + t * l.padded));
  }
  const AttentionState all = merged_over_warp(own);
  const float inverse = all.d > 0.0F ? 1.0F / all.d : 0.0F;
  for (uint32_t t = lane; t < tiles; t += 32) {
    const float log = AttentionState::from_l2(l.tile_states + base + t * l.padded).m;
    const float factor = all.d > 0.0F ? exp2f(log - all.m) * inverse : 0.0F;
    factors[t * l.padded + h] = factor;
    l.factors[base + t * l.padded] = factor;
  }
  if (lane == 0 && h < l.group) l.log_sums[kv_head * l.group + h] = all.log2_sum();
}

/// Weights of a few partitions per thread, of all heads.
template <uint32_t P>
struct WeightBatch {
  static constexpr uint32_t kAtOnce = P > 4 ? 24 / P : 6;
  float w[kAtOnce][P];

  __device__ void load(const float* weights, uint32_t begin, uint32_t count) {
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = begin + k * kThreads + threadIdx.x;
      load_group<P>(weights + size_t{min(i, count - 1)} * P, w[k]);
    }
  }
};

/// Normalises; then keys of all partitions, and how many fall into each bin. The first weights are under way while sums
/// are added up.
template <uint32_t P>
__device__ void make_keys(const PartitionsLayer& l, uint32_t kv_head, uint32_t count,
                          uint32_t tiles, float* factors, uint32_t* keys, uint32_t* bins) {
  constexpr uint32_t kAtOnce = WeightBatch<P>::kAtOnce;
  const float* weights = l.weights + size_t{kv_head} * l.capacity * P;
  WeightBatch<P> batch;
  batch.load(weights, 0, count);
  normalise(l, kv_head, tiles, factors);
  __syncthreads();
  for (uint32_t begin = 0; begin < count; begin += kThreads * kAtOnce) {
    if (begin != 0) batch.load(weights, begin, count);
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = begin + k * kThreads + threadIdx.x;
      if (i >= count) break;
      float merit = 0.0F;
#pragma unroll
      for (uint32_t h = 0; h < P; ++h) merit += batch.w[k][h] * factors[i / kPartitionTile * P + h];
      keys[i] = merit_key(merit);
      count_key(bins, keys[i]);
    }
  }
  __syncthreads();
}

/// Sets the bits of the `wanted` partitions with the largest keys.
__device__ void select(Selecting<kWarps>& s, const uint32_t* keys, uint32_t count, uint32_t wanted,
                       uint32_t* bits) {
  if (threadIdx.x == 0) s.found = 0;
  const uint32_t in_bin = find_threshold(s, s.bins[bin_of_thread()], wanted, count);
  const uint32_t bin = s.bin;
  const bool is_listed = in_bin <= kCandidates;
  for (uint32_t begin = 0; begin < count; begin += kThreads) {
    const uint32_t i = begin + threadIdx.x;
    const uint32_t key = i < count ? keys[i] : 0;
    const uint32_t of = key >> kBinShift;
    const uint32_t chosen = __ballot_sync(kWholeWarp, i < count && of > bin);
    if (threadIdx.x % 32 == 0 && i < count) bits[i / 32] = chosen;
    if (i < count && of == bin && is_listed) {
      s.candidates[atomicAdd(&s.found, 1)] = candidate(key, i);
    }
  }
  __syncthreads();
  if (is_listed) {
    choose_candidates(s, wanted - s.above, bits);
  } else {
    choose_among_many(s, keys, count, wanted - s.above, bits);
  }
}

/// What the last block of a KV head does. Not inlined: one copy for all dimensions.
__device__ __noinline__ void choose_best(Choice& c, const PartitionsLayer& l, uint32_t kv_head,
                                         const PartitionsHead& head, const uint32_t* sequence) {
  Selecting<kWarps>& s = c.selecting;
  const uint32_t count = head.count;
  const uint32_t tiles = (count + kPartitionTile - 1) / kPartitionTile;
  const size_t base = size_t{kv_head} * l.capacity;
  const bool is_small = count <= kKeysInShared;
  uint32_t* keys = is_small ? c.keys : l.keys + base;
  uint32_t* kept_bits = l.chosen_bits + base / 32;
  uint32_t* bits = is_small ? c.bits : kept_bits;
  float* factors = tiles * l.padded <= kFactorsInShared
                       ? c.factors
                       : l.factors + base / kPartitionTile * l.padded;
  const uint32_t wanted = min(min(head.chosen, count), l.most_chosen);
  const uint32_t words = (count + 31) / 32;
  s.bins[threadIdx.x] = 0;
  if (wanted == count || wanted == 0) {
    normalise(l, kv_head, tiles, factors);
    for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
      bits[i] = wanted == 0 ? 0 : kWholeWarp >> (32 - min(count - 32 * i, 32U));
    }
    __syncthreads();
  } else {
    switch (l.padded) {
      case 1: make_keys<1>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      case 2: make_keys<2>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      case 4: make_keys<4>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      case 8: make_keys<8>(l, kv_head, count, tiles, factors, keys, s.bins); break;
      default: make_keys<16>(l, kv_head, count, tiles, factors, keys, s.bins); break;
    }
    select(s, keys, count, wanted, bits);
  }
  list_chosen(s, bits, count);
  publish(s, l, kv_head, wanted, *sequence + 1);
  set_least_shares(s, l, kv_head, count, wanted, [&](uint32_t id, uint32_t h) {
    return __ldcg(l.weights + (base + id) * l.padded + h) *
           factors[id / kPartitionTile * l.padded + h];
  });
  if (!is_small) return;
  for (uint32_t i = threadIdx.x; i < words; i += kThreads) kept_bits[i] = bits[i];
}

template <uint32_t D>
__global__ void __launch_bounds__(kThreads, 2)
    choose_kernel(const __grid_constant__ PartitionsLayer l, const __grid_constant__ DeviceRows q,
                  const uint32_t* sequence) {
  __shared__ alignas(16) Shared shared;
  __shared__ bool is_last;
  const uint32_t kv_head = blockIdx.y;
  const PartitionsHead head = l.heads[kv_head];
  const uint32_t tiles = max((head.count + kPartitionTile - 1) / kPartitionTile, 1);
  if (blockIdx.x >= tiles) return;
  if (head.count != 0) score_tile<D>(shared.tile, l, q, kv_head, blockIdx.x, head);
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = arrive(l.arrivals + kv_head) == tiles - 1;
    if (is_last) l.arrivals[kv_head] = 0;
  }
  __syncthreads();
  if (is_last) choose_best(shared.choice, l, kv_head, head, sequence);
}

using Kernel = void (*)(PartitionsLayer, DeviceRows, const uint32_t*);

Kernel kernel_for(uint32_t dim) {
  switch (dim) {
    case 64: return choose_kernel<64>;
    case 80: return choose_kernel<80>;
    case 96: return choose_kernel<96>;
    case 128: return choose_kernel<128>;
    default: return choose_kernel<256>;
  }
}

}  // namespace

cudaError_t load_choose(const PartitionsLayer& layer) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel_for(layer.dim));
}

void launch_choose(const PartitionsLayer& layer, const DeviceRows& q, const uint32_t* sequence,
                   cudaStream_t stream) {
  const dim3 grid(layer.capacity / kPartitionTile, layer.kv_heads);
  kernel_for(layer.dim)<<<grid, kThreads, 0, stream>>>(layer, q, sequence);
}

}  // namespace keyhole::gpu
