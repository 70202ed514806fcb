// Scores the partitions of a layer and chooses the best ones of each KV head: by a cluster of 16 blocks per KV head, on
// GPUs that have such (compute capability 9.0 and 10.0). Grid (16, KV heads). Reads q `[q_heads, dim]`, codes
// `[kv_heads, capacity, dim]`; writes weights `[kv_heads, capacity, padded]` (shares here), chosen_bits, ids, log_sums
// (base 2). Blocks exchange sums and histograms through each other's shared memory, where the kernel of
// gpu/cuda/partitions/choose.cu leaves all that follows the scores to one block: its 16 partitions a thread become one,
// and the round trips to memory between the steps vanish.
#include <cooperative_groups.h>

#include "gpu/cuda/partitions/group.cuh"
#include "gpu/cuda/partitions/score.cuh"
#include "gpu/cuda/partitions/select.cuh"

namespace keyhole::gpu {

namespace {

constexpr uint32_t kBlocks = 16;
// 17 warps of 32 partitions in 16 blocks: 128k keys at 16 each, and a few more, in one round.
constexpr uint32_t kWarps = 17;
constexpr uint32_t kThreads = 32 * kWarps;
static_assert(kThreads >= kBins && kThreads % kMaxDeviceGroup == 0 &&
              kThreads >= kBlocks * kMaxDeviceGroup);
static_assert(kWarps >= kMaxDeviceGroup);

// Two blocks on a multiprocessor, so that a cluster fits on 8 of them.
constexpr size_t kMostShared = size_t{110} << 10;

struct Fixed {
  Scoring<kWarps> scoring;
  Selecting<kWarps> selecting;
  alignas(16) uint32_t bins[4][kBins];              // sums of four blocks each
  AttentionState states[kBlocks][kMaxDeviceGroup];  // of each block: largest log2 w, sum of weights
  float shifts[kMaxDeviceGroup], inverses[kMaxDeviceGroup];  // share = 2^(log2 w - shift) * inverse
};

/// Partitions that a block looks after where a head has `count`: whole words of bits.
__host__ __device__ uint32_t rows_of_block(uint32_t count) {
  return (count + 32 * kBlocks - 1) / (32 * kBlocks) * 32;
}

/// Shared memory beside Fixed: bits of all partitions (of the first block), keys and logs of the block's own.
struct Places {
  uint32_t keys, logs, end;  // bytes
  __host__ __device__ explicit Places(const PartitionsLayer& l) {
    const uint32_t rows = rows_of_block(l.capacity);
    keys = static_cast<uint32_t>((sizeof(Fixed) + 15) / 16 * 16) + l.capacity / 8;
    logs = keys + rows * static_cast<uint32_t>(sizeof(uint32_t));
    end = logs + rows * l.padded * static_cast<uint32_t>(sizeof(float));
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace cg = cooperative_groups;

/// Shares of the block's partitions, to logs and to l.weights; keys; how many fall into each bin.
template <uint32_t P>
__device__ void make_shares(Fixed& s, float* logs, const PartitionsLayer& l, size_t first,
                            uint32_t rows, uint32_t* keys) {
  float* out = l.weights + first * P;
  for (uint32_t i = threadIdx.x; i < rows; i += kThreads) {
    float share[P];
    load_group<P>(logs + i * P, share);
    float merit = 0.0F;
#pragma unroll
    for (uint32_t h = 0; h < P; ++h) {
      share[h] = exp2f(share[h] - s.shifts[h]) * s.inverses[h];
      merit += share[h];
    }
    store_group<P>(out + i * P, share);
    keys[i] = merit_key(merit);
    count_key(s.selecting.bins, keys[i]);
  }
}

template <uint32_t D>
__global__ void __launch_bounds__(kThreads, 2)
    choose_kernel(const __grid_constant__ PartitionsLayer l, const __grid_constant__ DeviceRows q,
                  const uint32_t* sequence) {
  extern __shared__ __align__(16) std::byte memory[];
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.barrier_arrive();  // this block is there, and can be written to
  const uint32_t block = cluster.block_rank();
  const uint32_t kv_head = blockIdx.y;
  const PartitionsHead head = l.heads[kv_head];
  const uint32_t count = head.count;
  const uint32_t wanted = min(min(head.chosen, count), l.most_chosen);
  const Places places(l);
  Fixed& s = *reinterpret_cast<Fixed*>(memory);
  auto* keys = reinterpret_cast<uint32_t*>(memory + places.keys);
  uint32_t* bits = keys - l.capacity / 32;
  auto* logs = reinterpret_cast<float*>(memory + places.logs);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t warp = threadIdx.x / 32;

  // Every thread knows its part: partitions [first, first + rows).
  const uint32_t first = block * rows_of_block(count);
  const uint32_t rows = first < count ? min(rows_of_block(count), count - first) : 0;
  if (threadIdx.x < kBins) s.selecting.bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.selecting.found = 0;
  if (count != 0) score_rows<D, kWarps>(s.scoring, logs, l, q, kv_head, head, first, rows);
  __syncthreads();
  const uint32_t h = threadIdx.x % l.padded;
  const float shift = count != 0 ? largest_of(s.scoring, h) : kMinusInf;
  __syncthreads();
  const float by = finite_base(shift);
  float sum = 0.0F;
  for (uint32_t i = threadIdx.x; i < rows * l.padded; i += kThreads) sum += exp2f(logs[i] - by);
  sum = sum_of_head(s.scoring, sum, l.padded);
  cluster.barrier_wait();
  // The first `padded` threads have the sums; each tells one head to all blocks.
  if (threadIdx.x < l.padded) {
    for (uint32_t b = 0; b < kBlocks; ++b) {
      cluster.map_shared_rank(&s, b)->states[block][threadIdx.x] = {shift, sum};
    }
  }
  cluster.sync();

  if (warp < l.padded) {
    const AttentionState all =
        merged_over_warp(lane < kBlocks ? s.states[lane][warp] : AttentionState::empty());
    if (lane == 0) {
      s.shifts[warp] = finite_base(all.m);
      s.inverses[warp] = all.d > 0.0F ? 1.0F / all.d : 0.0F;
      if (block == 0 && warp < l.group) l.log_sums[kv_head * l.group + warp] = all.log2_sum();
    }
  }
  __syncthreads();
  const size_t base = size_t{kv_head} * l.capacity;
  switch (l.padded) {
    case 1: make_shares<1>(s, logs, l, base + first, rows, keys); break;
    case 2: make_shares<2>(s, logs, l, base + first, rows, keys); break;
    case 4: make_shares<4>(s, logs, l, base + first, rows, keys); break;
    case 8: make_shares<8>(s, logs, l, base + first, rows, keys); break;
    default: make_shares<16>(s, logs, l, base + first, rows, keys); break;
  }
  cluster.sync();

  // Every block finds the threshold by itself, and writes to the first block which of its partitions are chosen, and
  // which are candidates.
  const bool is_trivial = wanted == 0 || wanted == count;
  bool is_listed = true;
  if (!is_trivial) {
    // Four bins of four blocks a thread.
    if (threadIdx.x < kBins) {
      const uint32_t bins = threadIdx.x % (kBins / 4);
      const uint32_t blocks = threadIdx.x / (kBins / 4);
      uint4 sums = {};
#pragma unroll
      for (uint32_t b = 0; b < kBlocks / 4; ++b) {
        const Fixed* of = cluster.map_shared_rank(&s, blocks * (kBlocks / 4) + b);
        const uint4 x = reinterpret_cast<const uint4*>(of->selecting.bins)[bins];
        sums = {sums.x + x.x, sums.y + x.y, sums.z + x.z, sums.w + x.w};
      }
      reinterpret_cast<uint4*>(s.bins[blocks])[bins] = sums;
    }
    __syncthreads();
    uint32_t of_bin = 0;
    if (threadIdx.x < kBins) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) of_bin += s.bins[i][bin_of_thread()];
    }
    is_listed = find_threshold(s.selecting, of_bin, wanted, count) <= kCandidates;
    const uint32_t bin = s.selecting.bin;
    Fixed* leader = cluster.map_shared_rank(&s, 0);
    uint32_t* leader_bits = cluster.map_shared_rank(bits, 0);
    for (uint32_t begin = warp * 32; begin < rows; begin += kThreads) {
      const uint32_t i = begin + lane;
      const uint32_t key = i < rows ? keys[i] : 0;
      const uint32_t of = key >> kBinShift;
      const uint32_t chosen = __ballot_sync(kWholeWarp, i < rows && of > bin);
      if (lane == 0) leader_bits[(first + begin) / 32] = chosen;
      if (i >= rows) continue;
      if (!is_listed) {
        l.keys[base + first + i] = key;
      } else if (of == bin) {
        leader->selecting.candidates[atomicAdd(&leader->selecting.found, 1)] =
            candidate(key, first + i);
      }
    }
  }
  cluster.sync();
  if (block != 0) return;

  const uint32_t words = (count + 31) / 32;
  if (is_trivial) {
    for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
      bits[i] = wanted == 0 ? 0 : kWholeWarp >> (32 - min(count - 32 * i, 32U));
    }
    __syncthreads();
  } else if (is_listed) {
    choose_candidates(s.selecting, wanted - s.selecting.above, bits);
  } else {
    choose_among_many(s.selecting, l.keys + base, count, wanted - s.selecting.above, bits);
  }
  list_chosen(s.selecting, bits, count);
  publish(s.selecting, l, kv_head, wanted, *sequence + 1);
  for (uint32_t i = threadIdx.x; i < words; i += kThreads) {
    l.chosen_bits[base / 32 + i] = bits[i];
  }
  set_least_shares(s.selecting, l, kv_head, count, wanted, [&](uint32_t id, uint32_t head_of) {
    return __ldcg(l.weights + (base + id) * l.padded + head_of);
  });
}

#else

template <uint32_t D>
__global__ void __launch_bounds__(kThreads, 2)
    choose_kernel(const __grid_constant__ PartitionsLayer, const __grid_constant__ DeviceRows,
                  const uint32_t*) {}

#endif

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

/// attribute: memory for one, which the configuration points to.
cudaLaunchConfig_t launch_of(const PartitionsLayer& layer, cudaLaunchAttribute& attribute,
                             cudaStream_t stream) {
  attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks, layer.kv_heads);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Places(layer).end;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

}  // namespace

bool load_choose_cluster(const PartitionsLayer& layer, int compute_major) {
  const Places places(layer);
  // Those that are known to have clusters of 16.
  if ((compute_major != 9 && compute_major != 10) || places.end > kMostShared) return false;
  Kernel kernel = kernel_for(layer.dim);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_of(layer, attribute, nullptr);
  int clusters = 0;
  const bool works = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                          1) == cudaSuccess &&
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(kMostShared)) == cudaSuccess &&
                     cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess &&
                     clusters > 0;
  if (!works) (void)cudaGetLastError();
  return works;
}

cudaError_t launch_choose_cluster(const PartitionsLayer& layer, const DeviceRows& q,
                                  const uint32_t* sequence, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_of(layer, attribute, stream);
  return cudaLaunchKernelEx(&config, kernel_for(layer.dim), layer, q, sequence);
}

}  // namespace keyhole::gpu
