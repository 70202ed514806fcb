// FlashAttention-2's scheme over one piece of rows: a thread block keeps 64 queries of one head, a warp 16 of them, walks over
// the rows 64 (32 of 256 components) at a time, and never writes a logit to memory. What it has summed up is read before and
// written after.
//
// ACCURACY. Queries are two numbers of T, so that logits are those of fp32 queries: their second part is added up where it is
// not 0 for some query of the block. Weights are one fp16 (2^-11 of each), or two bf16.
#pragma once

#include <string>
#include <type_traits>

#include "gpu/cuda/blocked/blocked_kernels.h"
#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/tensor_core.cuh"

namespace keyhole::gpu::blocked {

constexpr int kThreads = 128;
constexpr int kQueries = 64;  ///< of a thread block
/// Elements of a row in shared memory: the 8 rows of an ldmatrix then lie in 8 different groups of banks.
template <int d>
constexpr int kPitch = d + 8;
template <int d>
constexpr int kKeys = d <= 128 ? 64 : 32;
template <int d>
constexpr size_t kSharedBytes = sizeof(uint16_t) * kPitch<d> * (2 * kQueries + 2 * kKeys<d>);

/// Copies rows [first, first + rows) of `[.., stride]` to shared memory; rows from `end` on become zeros.
template <int d, int rows, class T>
__device__ inline void fetch_rows(T* shared, const T* global, size_t stride, uint32_t first, uint32_t end) {
  constexpr int kPieces = d / 8;
  static_assert(rows * kPieces % kThreads == 0);
#pragma unroll
  for (int i = 0; i < rows * kPieces / kThreads; ++i) {
    const int piece = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = piece / kPieces, column = piece % kPieces * 8;
    const bool there = first + row < end;
    copy_async(shared_address(shared + row * kPitch<d> + column),
               global + (there ? first + row : 0) * stride + column, there);
  }
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}
/// 2^x, one instruction; what is too small for a normal number is 0.
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T, int d>
__global__ void __launch_bounds__(kThreads, d <= 128 ? 2 : 1) attend_kernel(const BlockedParams a) {
  constexpr int kKeys = blocked::kKeys<d>;
  constexpr bool kTwoWeights = std::is_same_v<T, __nv_bfloat16>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const q_rows = reinterpret_cast<T*>(memory);
  T* const low_rows = q_rows + kQueries * kPitch<d>;
  T* const k_rows = low_rows + kQueries * kPitch<d>;
  T* const v_rows = k_rows + kKeys * kPitch<d>;

  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t head = blockIdx.x, kv_head = head / (a.q_heads / a.kv_heads);
  // The last queries of a causal piece have the most rows before them: beginning with them evens out the blocks' ends.
  const uint32_t first = (gridDim.y - 1 - blockIdx.y) * kQueries;
  const uint32_t end = a.causal ? min(a.rows, a.first + first + kQueries) : a.rows;
  const uint16_t* list = nullptr;
  uint32_t tiles = (end + kKeys - 1) / kKeys;
  if (a.lists.counts != nullptr) {
    const size_t at = size_t{head} * ((a.n + kListQueries - 1) / kListQueries) + first / kListQueries;
    list = a.lists.blocks + at * a.lists.capacity;
    tiles = min(a.lists.counts[at], a.lists.capacity) * (kListRows / kKeys);
  }
  const auto row_of = [&](uint32_t tile) {
    if (list == nullptr) return tile * kKeys;
    constexpr uint32_t kOfBlock = kListRows / kKeys;
    return __ldg(list + tile / kOfBlock) * kListRows + tile % kOfBlock * kKeys;
  };
  const size_t q_stride = size_t{a.q_heads} * d;
  const T* const keys = static_cast<const T*>(a.keys) + kv_head * a.head_stride;
  const T* const values = static_cast<const T*>(a.values) + kv_head * a.head_stride;

  fetch_rows<d, kQueries>(q_rows, static_cast<const T*>(a.q) + size_t{head} * d, q_stride, first, a.n);
  fetch_rows<d, kQueries>(low_rows, static_cast<const T*>(a.q_low) + size_t{head} * d, q_stride, first, a.n);
  if (tiles != 0) fetch_rows<d, kKeys>(k_rows, keys, a.row_stride, row_of(0), end);
  commit_copies();

  // The lane's rows of the warp's 16, and their sums so far.
  uint32_t rows[2];
  float out[d / 8][4] = {}, top[2] = {kMinusInf, kMinusInf}, sum[2] = {};
  uint64_t seen[2] = {~0ULL, ~0ULL};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = first + warp * 16 + lane / 4 + half * 8;
    if (rows[half] >= a.n) continue;
    if (a.mask != nullptr) seen[half] = a.mask[rows[half]];
    if (a.is_first) continue;
    const size_t at = size_t{rows[half]} * a.q_heads + head;
    const float2 before = a.sums[at];
    top[half] = before.x;
    sum[half] = lane % 4 == 0 ? before.y : 0.0F;
#pragma unroll
    for (int n = 0; n < d / 8; ++n) {
      const float2 x = *reinterpret_cast<const float2*>(a.o + at * d + n * 8 + lane % 4 * 2);
      out[n][2 * half] = x.x, out[n][2 * half + 1] = x.y;
    }
  }

  // Rows of ldmatrix: of q and of transposed v, lanes 0-15 name 16 rows, lanes 16-31 the same rows 8 columns on; of k, lanes
  // 0-7 and 8-15 name 8 rows at two columns, lanes 16-31 the next 8 rows.
  const uint32_t q_lane = shared_address(q_rows + (warp * 16 + lane % 16) * kPitch<d> + lane / 16 * 8);
  const uint32_t low_lane = q_lane + kQueries * kPitch<d> * sizeof(T);
  const uint32_t k_lane =
      shared_address(k_rows + (lane / 16 * 8 + lane % 8) * kPitch<d> + lane / 8 % 2 * 8);
  const uint32_t v_lane = shared_address(v_rows + lane % 16 * kPitch<d> + lane / 16 * 8);
  const float cap = a.logits.softcap;
  const float to_base2 = cap > 0.0F ? kLog2E : a.logits.scale * kLog2E;
  bool has_low = true;

  for (uint32_t tile = 0; tile < tiles; ++tile) {
    wait_for_copies<0>();
    __syncthreads();  // keys are here, and all warps are done with the values before
    if (tile == 0) {
      uint32_t any = 0;
      for (int i = static_cast<int>(threadIdx.x); i < kQueries * (d / 2); i += kThreads) {
        any |= *reinterpret_cast<const uint32_t*>(low_rows + i / (d / 2) * kPitch<d> + i % (d / 2) * 2) & 0x7FFF7FFFU;
      }
      has_low = __syncthreads_or(any != 0) != 0;
    }
    const uint32_t row = row_of(tile);
    fetch_rows<d, kKeys>(v_rows, values, a.row_stride, row, end);
    commit_copies();

    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      uint32_t q[4], low[4];
      load_matrices(q, q_lane + step * 16 * sizeof(T));
      if (has_low) load_matrices(low, low_lane + step * 16 * sizeof(T));
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t k[4];
        load_matrices(k, k_lane + (pair * 16 * kPitch<d> + step * 16) * sizeof(T));
        multiply_add<T>(s[2 * pair], q, k[0], k[1]);
        multiply_add<T>(s[2 * pair + 1], q, k[2], k[3]);
        if (has_low) {
          multiply_add<T>(s[2 * pair], low, k[0], k[1]);
          multiply_add<T>(s[2 * pair + 1], low, k[2], k[3]);
        }
      }
    }

    wait_for_copies<0>();
    __syncthreads();  // values are here, and all warps are done with the keys
    if (tile + 1 < tiles) {
      fetch_rows<d, kKeys>(k_rows, keys, a.row_stride, row_of(tile + 1), end);
      commit_copies();
    }

    if (cap > 0.0F) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (float& x : s[n]) x = cap * tanhf(a.logits.scale * x / cap);
      }
    }
    // At the end of the rows, and on the diagonal, where a query sees none behind its own.
    const uint32_t last = row + kKeys;
    if (last > end || (a.causal && (last > a.first + first + warp * 16 + 1 || a.mask != nullptr))) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t key = row + n * 8 + lane % 4 * 2 + i % 2;
          const bool hidden = a.causal && (key > a.first + rows[i / 2] || (seen[i / 2] >> (key % 64) & 1U) == 0);
          if (key >= end || hidden) s[n][i] = kMinusInf;
        }
      }
    }

    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kMinusInf;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      }
      largest = fmaxf(top[half], quad_max(largest));
      const float base = finite_base(largest);
      shrink[half] = power_of_2((top[half] - base) * to_base2);
      top[half] = largest;
      float more = 0.0F;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[n][i] = power_of_2(fmaf(s[n][i], to_base2, -base * to_base2));
          more += s[n][i];
        }
      }
      sum[half] = fmaf(sum[half], shrink[half], more);
    }
    // Far into the rows the largest logits seldom move.
    if (__any_sync(kWholeWarp, shrink[0] != 1.0F || shrink[1] != 1.0F)) {
#pragma unroll
      for (int n = 0; n < d / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][i] *= shrink[i / 2];
      }
    }

#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t weights[4], rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s[2 * step + i / 2][i % 2 * 2], y = s[2 * step + i / 2][i % 2 * 2 + 1];
        const T a0 = rounded_to<T>(x), a1 = rounded_to<T>(y);
        weights[i] = packed(a0, a1);
        if constexpr (kTwoWeights) {
          rest[i] = packed(rounded_to<T>(x - as_float(a0)), rounded_to<T>(y - as_float(a1)));
        }
      }
#pragma unroll
      for (int pair = 0; pair < d / 16; ++pair) {
        uint32_t v[4];
        load_matrices_transposed(v, v_lane + (step * 16 * kPitch<d> + pair * 16) * sizeof(T));
        multiply_add<T>(out[2 * pair], weights, v[0], v[1]);
        multiply_add<T>(out[2 * pair + 1], weights, v[2], v[3]);
        if constexpr (kTwoWeights) {
          multiply_add<T>(out[2 * pair], rest, v[0], v[1]);
          multiply_add<T>(out[2 * pair + 1], rest, v[2], v[3]);
        }
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = quad_sum(sum[half]);
    if (rows[half] >= a.n) continue;
    const size_t at = size_t{rows[half]} * a.q_heads + head;
    if (lane % 4 == 0) a.sums[at] = make_float2(top[half], total);
#pragma unroll
    for (int n = 0; n < d / 8; ++n) {
      *reinterpret_cast<float2*>(a.o + at * d + n * 8 + lane % 4 * 2) =
          make_float2(out[n][2 * half], out[n][2 * half + 1]);
    }
  }
}

template <class T, int d>
void launch_of(const BlockedParams& params, cudaStream_t stream) {
  constexpr size_t kBytes = kSharedBytes<d>;
  check(cudaFuncSetAttribute(attend_kernel<T, d>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "shared memory of blocked attention");
  const dim3 grid(params.q_heads, (params.n + kQueries - 1) / kQueries);
  attend_kernel<T, d><<<grid, kThreads, kBytes, stream>>>(params);
  check(cudaGetLastError(), "blocked attention");
}

template <class T>
void launch(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch_of<T, 64>(params, stream);
    case 80: return launch_of<T, 80>(params, stream);
    case 96: return launch_of<T, 96>(params, stream);
    case 128: return launch_of<T, 128>(params, stream);
    case 256: return launch_of<T, 256>(params, stream);
    default:
      throw Error(Status::invalid_argument, "blocked attention: head dimension " + std::to_string(head_dim));
  }
}

}  // namespace keyhole::gpu::blocked
