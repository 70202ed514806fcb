// Logits of sampled queries and all rows, summed up by blocks of 64 rows: the first half of attention, whose sums
// need no order. A thread block has a run of blocks and 128 (of 256 components: 64) of a KV head's pairs (sample,
// query head of the group), so that keys are read once for the whole group.
#pragma once

#include <string>

#include "gpu/cuda/prefill/block_choice.h"
#include "gpu/cuda/prefill/blocked_kernel.cuh"

namespace keyhole::gpu::blocked {

// Number of pairs of a thread block. Of 256 components it is half as many, for the 99 KiB of shared memory of GPUs
// for desktops.
template <int d>
constexpr int kTilesOfSamples = d <= 128 ? 2 : 1;
template <int d>
constexpr int kPairs = kQueries<kTilesOfSamples<d>>;
constexpr uint32_t kRunOfBlocks = 32;  ///< of a thread block
static_assert(kListRows == 64);

template <class T, int d>
__global__ void __launch_bounds__(kThreads, d <= 128 ? 2 : 1)
    sample_kernel(const __grid_constant__ BlockedParams a,
                  const __grid_constant__ SampledWeights w) {
  constexpr int kKeys = kListRows, kPieces = d / 8;
  constexpr int kSampleTiles = kTilesOfSamples<d>, kPairs = blocked::kPairs<d>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const q_rows = reinterpret_cast<T*>(memory);
  T* const k_rows = q_rows + kPairs * kPitch<d>;

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t kv_head = blockIdx.z, group = a.q_heads / a.kv_heads, pairs = w.samples * group;
  bool is_wanted = false;
  for (uint32_t i = 0; i < group; ++i) is_wanted = is_wanted || w.heads.has(kv_head * group + i);
  if (!is_wanted) return;
  const uint32_t first_pair = blockIdx.y * kPairs;
  const auto query_of = [&](uint32_t pair) {
    return w.query(a.n, min(pair / group, w.samples - 1));
  };
  const uint32_t end = Seen::by(a, query_of(first_pair + kPairs - 1)).to;
  const uint32_t begin = blockIdx.x * kRunOfBlocks, stop = min(begin + kRunOfBlocks, w.blocks);
  const uint32_t count = stop - begin;

  const auto fetch_keys = [&](uint32_t tile) {
    fetch_rows<d, kKeys>(k_rows + tile % 2 * kKeys * kPitch<d>,
                         static_cast<const T*>(a.keys) + kv_head * a.head_stride, a.row_stride,
                         (begin + tile) * kKeys, end);
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kPairs * kPieces / kThreads; ++i) {
    const int piece = i * kThreads + static_cast<int>(threadIdx.x), row = piece / kPieces,
              column = piece % kPieces * 8;
    const uint32_t pair = first_pair + row;
    const bool there = pair < pairs;
    const size_t at = there ? query_of(pair) * a.q_token_stride +
                                  (kv_head * group + pair % group) * a.q_head_stride
                            : 0;
    copy_async(shared_address(q_rows + row * kPitch<d> + column),
               static_cast<const T*>(a.q) + at + column, there);
  }
  fetch_keys(0);

  const uint32_t q_lane =
      shared_address(q_rows + (warp * kSampleTiles * 16 + lane % 16) * kPitch<d> + lane / 16 * 8);
  const uint32_t k_lane =
      shared_address(k_rows + (lane / 16 * 8 + lane % 8) * kPitch<d> + lane / 8 % 2 * 8);
  const float cap = a.logits.softcap;
  const float to_base2 = cap > 0.0F ? kLog2E : a.logits.scale * kLog2E;
  Seen seen[kSampleTiles][2];
  float* to[kSampleTiles][2];
#pragma unroll
  for (int t = 0; t < kSampleTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = first_pair + (warp * kSampleTiles + t) * 16 + lane / 4 + half * 8;
      seen[t][half] = pair < pairs ? Seen::by(a, query_of(pair)) : Seen{0, 0};
      const size_t head = size_t{kv_head} * group + pair % group;
      to[t][half] =
          pair < pairs ? w.weights + (head * w.samples + pair / group) * w.blocks : nullptr;
    }
  }

  for (uint32_t tile = 0; tile < count; ++tile) {
    __syncthreads();  // all warps are done with the keys before last
    if (tile + 1 < count) {
      fetch_keys(tile + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const uint32_t k_at = k_lane + tile % 2 * kKeys * kPitch<d> * sizeof(T);
    float s[kSampleTiles][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      uint32_t q[kSampleTiles][4];
#pragma unroll
      for (int t = 0; t < kSampleTiles; ++t) {
        load_matrices(q[t], q_lane + (t * 16 * kPitch<d> + step * 16) * sizeof(T));
      }
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t k[4];
        load_matrices(k, k_at + (pair * 16 * kPitch<d> + step * 16) * sizeof(T));
#pragma unroll
        for (int t = 0; t < kSampleTiles; ++t) {
          multiply_add<T>(s[t][2 * pair], q[t], k[0], k[1]);
          multiply_add<T>(s[t][2 * pair + 1], q[t], k[2], k[3]);
        }
      }
    }
    const uint32_t block = begin + tile, row = block * kKeys;
#pragma unroll
    for (int t = 0; t < kSampleTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = kMinusInf;
        const Seen& sees = seen[t][half];
        const bool all = sees.from <= row && row + kKeys <= sees.to;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            float& x = s[t][n][i];
            if (cap > 0.0F) x = cap * tanhf(a.logits.scale * x / cap);
            const uint32_t key = row + n * 8 + lane % 4 * 2 + i % 2;
            if (!all && (key < sees.from || key >= sees.to)) x = kMinusInf;
            largest = fmaxf(largest, x);
          }
        }
        largest = quad_max(largest);
        const float base = finite_base(largest) * to_base2;
        float sum = 0.0F;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            sum += power_of_2(fmaf(s[t][n][i], to_base2, -base));
        }
        sum = quad_sum(sum);
        if (lane % 4 == 0 && to[t][half] != nullptr) to[t][half][block] = base + log2f(sum);
      }
    }
  }
}

template <class T, int d>
void sample(const BlockedParams& a, const SampledWeights& w, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(T) * kPitch<d> * (kPairs<d> + 2 * kListRows);
  static_assert(kBytes <= size_t{99} << 10U);
  check(cudaFuncSetAttribute(sample_kernel<T, d>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "shared memory of sampled queries");
  const uint32_t pairs = w.samples * (a.q_heads / a.kv_heads);
  const dim3 grid((w.blocks + kRunOfBlocks - 1) / kRunOfBlocks, (pairs + kPairs<d> - 1) / kPairs<d>,
                  a.kv_heads);
  sample_kernel<T, d><<<grid, kThreads, kBytes, stream>>>(a, w);
  check_launch("weights of sampled queries");
}

template <class T>
void sample_of(const BlockedParams& a, const SampledWeights& w, uint32_t head_dim,
               cudaStream_t stream) {
  switch (head_dim) {
    case 64: return sample<T, 64>(a, w, stream);
    case 80: return sample<T, 80>(a, w, stream);
    case 96: return sample<T, 96>(a, w, stream);
    case 128: return sample<T, 128>(a, w, stream);
    case 256: return sample<T, 256>(a, w, stream);
    default:
      throw Error(Status::invalid_argument,
                  "sampled queries: head dimension " + std::to_string(head_dim));
  }
}

}  // namespace keyhole::gpu::blocked
