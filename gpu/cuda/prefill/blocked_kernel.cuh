// FlashAttention-2's scheme over one piece of rows: a thread block keeps 64 queries of one head, a warp 16 of them,
// walks over the rows 64 (of 256 components: 32) at a time, and never writes a logit to memory. Exact attention with
// up to 128 components has 128 queries a block and 32 a warp: what is loaded of keys and values then serves two
// products, and the tensor cores are the limit. With 512 components two warps have the same queries, and each makes the
// sums of half of the components, for which one has registers; where queries are one number, each makes the logits of
// half of the rows and tells the other. That takes 200 KB of shared memory; where a thread block may have 99 KB it has
// fewer queries.
//
// ACCURACY. Queries are one number of T or two, so that logits are those of fp32 queries: the second part is added up
// where it is not 0 for some query of the block. Weights are one fp16 (2^-11 of each), or two bf16. Where keys and
// values are two fp16 each, weights are, too, and each product is three: the relative error is some 1e-6.
#pragma once

#include <string>
#include <type_traits>

#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/ends.cuh"

namespace keyhole::gpu::blocked {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
/// Number of warps that share a query, and components of its sums that each has.
template <int d>
constexpr int kParts = d <= 256 ? 1 : d / 256;
template <int d>
constexpr int kOwn = d / kParts<d>;
/// Number of queries of a thread block; tiles: of 16 queries of a warp; warps: that have queries of their own.
template <int tiles, int warps = kWarps>
constexpr int kQueries = warps * 16 * tiles;
/// Elements from row to row in shared memory, so that the 8 rows of an ldmatrix lie in 8 different groups of banks.
template <int d>
constexpr int kPitch = d + 8;
/// Which numbers are sums of two numbers of T.
enum class Sums { none, queries, all };
/// The rows of a tile: with sums of two, as many as fit into 99 KB, which GPUs for desktops have, and as are copied by
/// all threads alike. Of 512 components as many as fit into 200 KB with all warps, and into 99 KB with fewer.
template <int d, Sums sums, int warps = kWarps>
constexpr int kKeys = sums == Sums::all                         ? (d == 80   ? 64
                                                                   : d > 128 ? 16
                                                                             : 32)
                      : d <= 128                                ? 64
                      : sums == Sums::queries&& warps != kWarps ? 16
                                                                : 32;
/// Number of warps with queries of their own that leaves 99 KB enough for 512 components.
template <Sums sums>
constexpr int kFewWarps = sums == Sums::all ? 1 : 2;
/// Whether two warps with the same queries divide the rows of a tile for the logits.
template <int d, Sums sums, int warps = kWarps>
constexpr bool kDividesLogits = kParts<d> == 2 && sums == Sums::none&& warps == kWarps;
/// Bytes of shared memory for rows. Numbers that are no sums have no second part there.
template <int d, int tiles, Sums sums, int warps = kWarps>
constexpr size_t kRowBytes =
    sizeof(uint16_t) * kPitch<d>*((sums == Sums::none ? 1 : 2) * kQueries<tiles, warps> +
                                  (sums == Sums::all ? 4 : 2) * kKeys<d, sums, warps>);
/// Bytes of all of it: behind the rows, logits that warps tell each other.
template <int d, int tiles, Sums sums, int warps = kWarps>
constexpr size_t kSharedBytes = kRowBytes<d, tiles, sums, warps> +
                                (kDividesLogits<d, sums, warps>
                                     ? sizeof(float) * kQueries<tiles, warps> *
                                           kKeys<d, sums, warps>
                                     : 0);

/// Copies rows [first, first + rows) of `[.., stride]` to shared memory; rows from `end` on become zeros.
template <int d, int rows, class T, int warps = kWarps>
__device__ inline void fetch_rows(T* shared, const T* global, size_t stride, uint32_t first,
                                  uint32_t end) {
  constexpr int kPieces = d / 8, kThreads = 32 * warps * kParts<d>;
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

template <class T, int d, int tiles, Sums sums, int warps = kWarps>
__global__ void __launch_bounds__(32 * warps * kParts<d>, d <= 128 ? 2 : 1)
    attend_kernel(const BlockedParams a) {
  constexpr int kThreads = 32 * warps * kParts<d>, kOwn = blocked::kOwn<d>;
  constexpr int kKeys = blocked::kKeys<d, sums, warps>;
  constexpr int kQueries = blocked::kQueries<tiles, warps>;
  constexpr bool kTwoQueries = sums != Sums::none, kTwoRows = sums == Sums::all;
  constexpr bool kDivides = kDividesLogits<d, sums, warps>;
  constexpr bool kTwoWeights = kTwoRows || std::is_same_v<T, __nv_bfloat16>;
  constexpr int kRowsSize = kKeys * kPitch<d>;  // of keys or values, of one part
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const q_rows = reinterpret_cast<T*>(memory);
  T* const low_rows = q_rows + kQueries * kPitch<d>;
  T* const k_rows = kTwoQueries ? low_rows + kQueries * kPitch<d> : low_rows;
  T* const v_rows = k_rows + (kTwoRows ? 2 : 1) * kRowsSize;

  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % warps;
  const int part = static_cast<int>(threadIdx.x) / (32 * warps);
  const int own = part * kOwn;  // the first component of the warp's sums
  const uint32_t head = blockIdx.x, kv_head = head / (a.q_heads / a.kv_heads);
  // The last queries of a causal piece have the most rows before them: beginning with them evens out the blocks' ends.
  const uint32_t first = (gridDim.y - 1 - blockIdx.y) * kQueries;
  const uint32_t end = Seen::by(a, min(first + kQueries, a.n) - 1).to;
  uint32_t begin = Seen::by(a, first).from / kKeys;
  const uint16_t* list = nullptr;
  uint32_t count = (end + kKeys - 1) / kKeys - begin;
  if (gridDim.z > 1) {
    const uint32_t from = blockIdx.z * count / gridDim.z;
    count = (blockIdx.z + 1) * count / gridDim.z - from;
    begin += from;
  }
  const size_t state =
      size_t{blockIdx.z} * a.n * a.q_heads;  // the thread block's among those of parts
  if (a.lists.counts != nullptr) {
    const size_t at =
        size_t{head} * ((a.n + kListQueries - 1) / kListQueries) + first / kListQueries;
    list = a.lists.blocks + at * a.lists.capacity;
    count = min(a.lists.counts[at], a.lists.capacity) * (kListRows / kKeys);
  }
  const auto row_of = [&](uint32_t tile) {
    if (list == nullptr) return (begin + tile) * kKeys;
    constexpr uint32_t kOfBlock = kListRows / kKeys;
    return __ldg(list + tile / kOfBlock) * kListRows + tile % kOfBlock * kKeys;
  };
  const size_t kv_at = kv_head * a.head_stride;
  const auto fetch_tile = [&](T* shared, const void* from, const void* low, uint32_t tile) {
    fetch_rows<d, kKeys, T, warps>(shared, static_cast<const T*>(from) + kv_at, a.row_stride,
                                   row_of(tile), end);
    if constexpr (kTwoRows) {
      fetch_rows<d, kKeys, T, warps>(shared + kRowsSize, static_cast<const T*>(low) + kv_at,
                                     a.row_stride, row_of(tile), end);
    }
  };

  const size_t q_head = head * a.q_head_stride;
  fetch_rows<d, kQueries, T, warps>(q_rows, static_cast<const T*>(a.q) + q_head, a.q_token_stride,
                                    first, a.n);
  if constexpr (kTwoQueries) {
    fetch_rows<d, kQueries, T, warps>(low_rows, static_cast<const T*>(a.q_low) + q_head,
                                      a.q_token_stride, first, a.n);
  }
  if (count != 0) fetch_tile(k_rows, a.keys, a.keys_low, 0);
  commit_copies();

  // The lane's rows among the warp's, and their sums so far.
  uint32_t rows[tiles][2];
  float out[tiles][kOwn / 8][4] = {}, top[tiles][2], sum[tiles][2] = {};
#pragma unroll
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[t][half] = first + (warp * tiles + t) * 16 + lane / 4 + half * 8;
      top[t][half] = kMinusInf;
      if (rows[t][half] >= a.n || a.is_first) continue;
      const size_t at = size_t{rows[t][half]} * a.q_heads + head;
      const float2 before = a.sums[at];
      top[t][half] = before.x;
      sum[t][half] = lane % 4 == 0 ? before.y : 0.0F;
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) {
        const float2 x =
            *reinterpret_cast<const float2*>(a.o + at * d + own + n * 8 + lane % 4 * 2);
        out[t][n][2 * half] = x.x, out[t][n][2 * half + 1] = x.y;
      }
    }
  }

  // The rows that lanes name to ldmatrix. For q and transposed v, lanes 0-15 name 16 rows and lanes 16-31 the same
  // rows 8 columns on; for k, lanes 0-7 and 8-15 name 8 rows at two columns and lanes 16-31 the next 8 rows.
  const uint32_t q_lane =
      shared_address(q_rows + (warp * tiles * 16 + lane % 16) * kPitch<d> + lane / 16 * 8);
  const uint32_t low_lane = q_lane + kQueries * kPitch<d> * sizeof(T);
  const uint32_t k_lane =
      shared_address(k_rows + (lane / 16 * 8 + lane % 8) * kPitch<d> + lane / 8 % 2 * 8);
  const uint32_t v_lane = shared_address(v_rows + lane % 16 * kPitch<d> + lane / 16 * 8 + own);
  const float cap = a.logits.softcap;
  const float to_base2 = cap > 0.0F ? kLog2E : a.logits.scale * kLog2E;
  bool has_low = true;
  // All queries of the warp see what its first query sees, except for windows and masks.
  const uint32_t warp_first = first + warp * tiles * 16;
  const uint32_t all_see = a.window != 0 || a.mask != nullptr ? 0 : Seen::by(a, warp_first).to;
  const uint32_t* const chosen = chosen_rows(a, head, first / kListQueries);
  const float limit = skip_of(a, head);

  for (uint32_t tile = 0; tile < count; ++tile) {
    const uint32_t row = row_of(tile);
    wait_for_copies<0>();
    __syncthreads();  // keys are here, and all warps are done with the values before
    if constexpr (sums == Sums::queries) {
      if (tile == 0) {
        uint32_t any = 0;
        for (int i = static_cast<int>(threadIdx.x); i < kQueries * (d / 2); i += kThreads) {
          any |= *reinterpret_cast<const uint32_t*>(low_rows + i / (d / 2) * kPitch<d> +
                                                    i % (d / 2) * 2) &
                 0x7FFF7FFFU;
        }
        has_low = __syncthreads_or(any != 0) != 0;
      }
    }
    fetch_tile(v_rows, a.values, a.values_low, tile);
    commit_copies();

    float s[tiles][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      uint32_t q[tiles][4], low[tiles][4];
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        const uint32_t at = (t * 16 * kPitch<d> + step * 16) * sizeof(T);
        load_matrices(q[t], q_lane + at);
        if (kTwoQueries && has_low) load_matrices(low[t], low_lane + at);
      }
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        if (kDivides && 2 * pair / (kKeys / 16) != part) continue;
        const uint32_t at = (pair * 16 * kPitch<d> + step * 16) * sizeof(T);
        uint32_t k[4], k_low[4];
        load_matrices(k, k_lane + at);
        if constexpr (kTwoRows) load_matrices(k_low, k_lane + kRowsSize * sizeof(T) + at);
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          multiply_add<T>(s[t][2 * pair], q[t], k[0], k[1]);
          multiply_add<T>(s[t][2 * pair + 1], q[t], k[2], k[3]);
          if (kTwoQueries && has_low) {
            multiply_add<T>(s[t][2 * pair], low[t], k[0], k[1]);
            multiply_add<T>(s[t][2 * pair + 1], low[t], k[2], k[3]);
          }
          if constexpr (kTwoRows) {
            multiply_add<T>(s[t][2 * pair], q[t], k_low[0], k_low[1]);
            multiply_add<T>(s[t][2 * pair + 1], q[t], k_low[2], k_low[3]);
          }
        }
      }
    }

    // What a lane makes or needs of the tile's logits, each in a place of its own: calls move(logit, place).
    const auto exchange = [&](int of_part, const auto& move) {
      auto* const places = reinterpret_cast<float*>(memory + kRowBytes<d, tiles, sums, warps>);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          if (n / (kKeys / 16) != of_part) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            move(s[t][n][i], places[(((warp * tiles + t) * (kKeys / 8) + n) * 4 + i) * 32 + lane]);
          }
        }
      }
    };
    if constexpr (kDivides) exchange(part, [](float& x, float& place) { place = x; });
    wait_for_copies<0>();
    __syncthreads();  // values and all logits are here, and all warps are done with the keys
    if constexpr (kDivides) exchange(1 - part, [](float& x, float& place) { x = place; });
    if (tile + 1 < count) {
      fetch_tile(k_rows, a.keys, a.keys_low, tile + 1);
      commit_copies();
    }

    if (cap > 0.0F) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (float& x : s[t][n]) x = cap * tanhf(a.logits.scale * x / cap);
        }
      }
    }
    if (row + kKeys > all_see) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Seen seen = Seen::by(a, rows[t][half]);
          const bool is_masked = a.mask != nullptr && rows[t][half] < a.n;
          const uint64_t mask = is_masked ? a.mask[rows[t][half]] : ~0ULL;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t key = row + n * 8 + lane % 4 * 2 + i;
              const bool sees = key >= seen.from && key < seen.to && (mask >> (key % 64) & 1U) != 0;
              if (!sees) s[t][n][2 * half + i] = kMinusInf;
            }
          }
        }
      }
    }

    if (chosen != nullptr) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint32_t bits = __ldg(chosen + (row + n * 8) / 32) >> (row + n * 8) % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((bits >> (lane % 4 * 2 + i) & 1U) != 0) continue;
#pragma unroll
          for (int t = 0; t < tiles; ++t) s[t][n][i] = s[t][n][2 + i] = kMinusInf;
        }
      }
    }
    if (limit > 0.0F) {
      bool is_heavy = false;
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float largest = kMinusInf;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
            largest = fmaxf(largest, fmaxf(s[t][n][2 * half], s[t][n][2 * half + 1]));
          largest = quad_max(largest);
          is_heavy = is_heavy || (rows[t][half] < a.n &&
                                  has_weight(largest * to_base2, top[t][half] * to_base2, limit));
        }
      }
      // The copies of the next rows are under way, and the loop's beginning has their barriers.
      if (!__any_sync(kWholeWarp, is_heavy)) continue;
    }

    bool moves = false;
    float shrink[tiles][2];
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = kMinusInf;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          largest = fmaxf(largest, fmaxf(s[t][n][2 * half], s[t][n][2 * half + 1]));
        }
        largest = fmaxf(top[t][half], quad_max(largest));
        const float base = finite_base(largest);
        shrink[t][half] = power_of_2((top[t][half] - base) * to_base2);
        moves = moves || shrink[t][half] != 1.0F;
        top[t][half] = largest;
        float more = 0.0F;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[t][n][i] = power_of_2(fmaf(s[t][n][i], to_base2, -base * to_base2));
            more += s[t][n][i];
          }
        }
        sum[t][half] = fmaf(sum[t][half], shrink[t][half], more);
      }
    }
    // Far into the rows the largest logits seldom move.
    if (__any_sync(kWholeWarp, moves)) {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int n = 0; n < kOwn / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[t][n][i] *= shrink[t][i / 2];
        }
      }
    }

#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t weights[tiles][4], rest[tiles][4];
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s[t][2 * step + i / 2][i % 2 * 2],
                      y = s[t][2 * step + i / 2][i % 2 * 2 + 1];
          const T a0 = rounded_to<T>(x), a1 = rounded_to<T>(y);
          weights[t][i] = packed(a0, a1);
          if constexpr (kTwoWeights) {
            rest[t][i] = packed(rounded_to<T>(x - as_float(a0)), rounded_to<T>(y - as_float(a1)));
          }
        }
      }
#pragma unroll
      for (int pair = 0; pair < kOwn / 16; ++pair) {
        const uint32_t at = (step * 16 * kPitch<d> + pair * 16) * sizeof(T);
        uint32_t v[4], v_low[4];
        load_matrices_transposed(v, v_lane + at);
        if constexpr (kTwoRows)
          load_matrices_transposed(v_low, v_lane + kRowsSize * sizeof(T) + at);
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          multiply_add<T>(out[t][2 * pair], weights[t], v[0], v[1]);
          multiply_add<T>(out[t][2 * pair + 1], weights[t], v[2], v[3]);
          if constexpr (kTwoWeights) {
            multiply_add<T>(out[t][2 * pair], rest[t], v[0], v[1]);
            multiply_add<T>(out[t][2 * pair + 1], rest[t], v[2], v[3]);
          }
          if constexpr (kTwoRows) {
            multiply_add<T>(out[t][2 * pair], weights[t], v_low[0], v_low[1]);
            multiply_add<T>(out[t][2 * pair + 1], weights[t], v_low[2], v_low[3]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = quad_sum(sum[t][half]);
      const uint32_t query = rows[t][half];
      if (query >= a.n) continue;
      const size_t at = size_t{query} * a.q_heads + head;
      if (a.final.data != nullptr) {
        const QueryEnd q = QueryEnd::of(a, head, top[t][half], total);
        if (a.final.lse != nullptr && lane % 4 == 0 && part == 0) a.final.lse[at] = q.lse;
        const size_t to =
            query * a.final.token_stride + head * a.final.head_stride + own + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kOwn / 8; ++n) {
          store_pair(a.final, to + n * 8, q.scale * out[t][n][2 * half],
                     q.scale * out[t][n][2 * half + 1]);
        }
        continue;
      }
      // All warps have read the sums before.
      if (lane % 4 == 0 && part == 0) a.sums[state + at] = make_float2(top[t][half], total);
#pragma unroll
      for (int n = 0; n < kOwn / 8; ++n) {
        *reinterpret_cast<float2*>(a.o + (state + at) * d + own + n * 8 + lane % 4 * 2) =
            make_float2(out[t][n][2 * half], out[t][n][2 * half + 1]);
      }
    }
  }
}

template <class T, int d, int tiles, Sums sums, int warps = kWarps>
void launch_kernel(const BlockedParams& params, cudaStream_t stream) {
  constexpr size_t kBytes = kSharedBytes<d, tiles, sums, warps>;
  constexpr uint32_t kQueries = blocked::kQueries<tiles, warps>;
  check(cudaFuncSetAttribute(attend_kernel<T, d, tiles, sums, warps>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "shared memory of blocked attention");
  const dim3 grid(params.q_heads, (params.n + kQueries - 1) / kQueries, params.parts);
  attend_kernel<T, d, tiles, sums, warps><<<grid, 32 * warps * kParts<d>, kBytes, stream>>>(params);
  check(cudaGetLastError(), "blocked attention");
}

/// Launches the kernel of all warps, or where a thread block of 512 components may have too little shared memory that
/// of few.
template <class T, int d, int tiles, Sums sums>
void launch_that_fits(const BlockedParams& params, cudaStream_t stream) {
  static_assert(d > 256 || kSharedBytes<d, tiles, sums> <= size_t{99} << 10U);
  if constexpr (d > 256) {
    constexpr int kFew = kFewWarps<sums>;
    constexpr size_t kBytes = kSharedBytes<d, tiles, sums>;
    static_assert(kSharedBytes<d, tiles, sums, kFew> <= size_t{99} << 10U);
    int device = 0;
    check(cudaGetDevice(&device), "the current CUDA device");
    if (shared_memory_of(device).of_block < kBytes) {
      return launch_kernel<T, d, tiles, sums, kFew>(params, stream);
    }
  }
  launch_kernel<T, d, tiles, sums>(params, stream);
}

template <class T, int d>
void launch_of(const BlockedParams& params, cudaStream_t stream) {
  // Weights of two numbers, and sums of 256 components, leave no registers for a second tile.
  constexpr int kExactTiles = d <= 128 && std::is_same_v<T, __half> ? 2 : 1;
  if constexpr (std::is_same_v<T, __half>) {
    if (params.keys_low != nullptr) return launch_that_fits<T, d, 1, Sums::all>(params, stream);
  }
  if (params.q_low != nullptr) return launch_that_fits<T, d, 1, Sums::queries>(params, stream);
  launch_that_fits<T, d, kExactTiles, Sums::none>(params, stream);
}

template <class T>
void launch(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64: return launch_of<T, 64>(params, stream);
    case 80: return launch_of<T, 80>(params, stream);
    case 96: return launch_of<T, 96>(params, stream);
    case 128: return launch_of<T, 128>(params, stream);
    case 256: return launch_of<T, 256>(params, stream);
    case 512: return launch_of<T, 512>(params, stream);
    default:
      throw Error(Status::invalid_argument,
                  "blocked attention: head dimension " + std::to_string(head_dim));
  }
}

}  // namespace keyhole::gpu::blocked
