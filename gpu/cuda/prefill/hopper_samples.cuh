// Weights of sampled queries (gpu/cuda/prefill/block_choice.h) on Hopper's own instructions: the first half of
// hopper_kernel.cuh, whose sums need no order. A thread block has 128 samples of one head and a run of keys.
#pragma once

#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/hopper_kernel.cuh"

namespace keyhole::gpu::hopper {

constexpr uint32_t kRunOfBlocks = 64;  ///< of a thread block
constexpr int kKeyStages = 4;

template <int columns>
struct SampleTiles {
  using Shape = Tiles<columns>;
  alignas(1024) uint16_t queries[Shape::kPanels * Shape::kQueryPanel];
  alignas(1024) uint16_t keys[kKeyStages][Shape::kPanels * Shape::kKeyPanel];
  CopyBarrier queries_are_here;
  CopyBarrier keys_are_here[kKeyStages], keys_are_used[kKeyStages];
};

/// Sums up the 64 keys of block `block` in a lane's part of the logits: log2 of the sum of powers, for both of its
/// rows.
template <int first, int n>
__device__ inline void sum_block(const BlockedParams& a, const Seen (&seen)[2], float (&logits)[n],
                                 uint32_t block, float to_base2, float (&sums)[2]) {
  const uint32_t key0 = block * kBlockRows + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool all =
        seen[half].from <= block * kBlockRows && (block + 1) * kBlockRows <= seen[half].to;
    float largest = kMinusInf;
#pragma unroll
    for (int i = 0; i < kBlockRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = logits[first + 4 * i + 2 * half + j];
        const uint32_t key = key0 + i * 8 + j;
        if (!all && (key < seen[half].from || key >= seen[half].to)) x = kMinusInf;
        largest = fmaxf(largest, x);
      }
    }
    largest = quad_max(largest);
    const float base = finite_base(largest) * to_base2;
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kBlockRows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        sum += power_of_2(fmaf(logits[first + 4 * i + 2 * half + j], to_base2, -base));
    }
    sums[half] = base + __log2f(quad_sum(sum));
  }
}

template <class T, int columns>
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(const __grid_constant__ Maps maps, const __grid_constant__ BlockedParams a,
                  const __grid_constant__ SampledWeights w) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = Tiles<columns>;
  constexpr int kPanels = Shape::kPanels, kBlocks = Shape::kBlocks, kKeys = Shape::kKeys;
  extern __shared__ unsigned char memory[];
  auto& shared = *reinterpret_cast<SampleTiles<columns>*>(
      (reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);

  const uint32_t head = blockIdx.y, kv_head = head / (a.q_heads / a.kv_heads);
  if (!w.heads.has(head)) return;
  const uint32_t first = blockIdx.z * kQueries, begin = blockIdx.x * kRunOfBlocks;
  // Blocks behind the rows that the tile's last sample sees have no weight.
  const uint32_t last = min(first + kQueries, w.samples) - 1;
  const uint32_t seen_blocks = (Seen::by(a, w.query(a.n, last)).to + kBlockRows - 1) / kBlockRows;
  const uint32_t stop = min(begin + kRunOfBlocks, w.blocks);
  const uint32_t tiles =
      seen_blocks <= begin ? 0 : (min(stop, seen_blocks) - begin + kBlocks - 1) / kBlocks;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;

  if (threadIdx.x == 0) {
    shared.queries_are_here.init(1);
    for (int i = 0; i < kKeyStages; ++i) {
      shared.keys_are_here[i].init(1);
      shared.keys_are_used[i].init(kConsumers * kGroupThreads / 32);
    }
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0 && tiles != 0) {
      shared.queries_are_here.expect(sizeof shared.queries);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_box(shared.queries + panel * Shape::kQueryPanel + half * 64 * kPanelColumns, &maps.q,
                   panel * kPanelColumns, head, first + half * 64, shared.queries_are_here);
        }
      }
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const uint32_t stage = tile % kKeyStages;
        shared.keys_are_used[stage].wait((tile / kKeyStages + 1) % 2);
        shared.keys_are_here[stage].expect(Shape::kTileBytes);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            copy_box(shared.keys[stage] + panel * Shape::kKeyPanel + i * kBlockRows * kPanelColumns,
                     &maps.k, panel * kPanelColumns, (begin + tile * kBlocks + i) * kBlockRows,
                     kv_head, shared.keys_are_here[stage]);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int own = group - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) % kGroupThreads / 32;
    const float cap = a.logits.softcap;
    const float to_base2 = cap > 0.0F ? kLog2E : a.logits.scale * kLog2E;
    Seen seen[2];
    float* to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t sample = first + own * 64 + warp * 16 + lane / 4 + half * 8;
      const bool there = sample < w.samples;
      seen[half] = there ? Seen::by(a, w.query(a.n, sample)) : Seen{0, 0};
      to[half] = there ? w.weights + (size_t{head} * w.samples + sample) * w.blocks : nullptr;
    }
    const uint32_t queries = shared_address(shared.queries) + own * 64 * kPanelColumns * 2;
    if (tiles != 0) shared.queries_are_here.wait(0);
    float logits[kKeys / 2];
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      const uint32_t stage = tile % kKeyStages;
      shared.keys_are_here[stage].wait(tile / kKeyStages % 2);
      multiply_queries<T, columns>(logits, queries, shared_address(shared.keys[stage]));
      wait_for_products<0>();
      hold(logits);
      if (lane == 0) shared.keys_are_used[stage].arrive();
      if (cap > 0.0F) {
#pragma unroll
        for (float& x : logits) x = cap * tanhf(a.logits.scale * x / cap);
      }
      const uint32_t block = begin + tile * kBlocks;
      float sums[kBlocks][2];
      sum_block<0>(a, seen, logits, block, to_base2, sums[0]);
      if constexpr (kBlocks == 2)
        sum_block<kBlockRows / 2>(a, seen, logits, block + 1, to_base2, sums[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (lane % 4 == i && to[half] != nullptr && block + i < stop)
            to[half][block + i] = sums[i][half];
        }
      }
    }
    // The blocks that no sample of the tile sees.
    const uint32_t rest = begin + tiles * kBlocks;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (uint32_t b = rest + lane % 4; b < stop; b += 4) {
        if (to[half] != nullptr) to[half][b] = kMinusInf;
      }
    }
  }
#endif
}

template <class T, int columns>
void sample_of(const BlockedParams& a, const SampledWeights& w, uint32_t dim, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SampleTiles<columns>) + 1024;
  check(cudaFuncSetAttribute(sample_kernel<T, columns>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "shared memory of sampled queries");
  BlockedParams queries = a;
  queries.q = static_cast<const T*>(a.q) + w.query(a.n, 0) * a.q_token_stride;
  queries.q_token_stride = w.stride * a.q_token_stride;
  queries.n = w.samples;
  const Maps maps{queries_map<T>(queries, dim), rows_map<T>(a, a.keys, dim), {}};
  const dim3 grid((w.blocks + kRunOfBlocks - 1) / kRunOfBlocks, a.q_heads,
                  (w.samples + kQueries - 1) / kQueries);
  sample_kernel<T, columns><<<grid, kThreads, kBytes, stream>>>(maps, a, w);
  check_launch("weights of sampled queries");
}

template <class T>
void sample(const BlockedParams& a, const SampledWeights& w, uint32_t dim, cudaStream_t stream) {
  if (dim <= 64) return sample_of<T, 64>(a, w, dim, stream);
  if (dim <= 128) return sample_of<T, 128>(a, w, dim, stream);
  return sample_of<T, 256>(a, w, dim, stream);
}

}  // namespace keyhole::gpu::hopper
