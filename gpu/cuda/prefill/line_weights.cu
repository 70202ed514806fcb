// Sums of softmax weights over columns and diagonals. A thread block has a head's last queries, 64 or fewer, and 2048
// rows, of which it multiplies 64 at a time; their weights pass through shared memory, where threads add up columns and
// then diagonals.
//
// DIAGONALS. With the first of the queries at position p, query r and row c of block b have distance p + r - 64 b - c.
// Distances of a block are 127 numbers, which overlap with those of the blocks beside it, and with no others: even and
// odd blocks write to two arrays, each number once.
#include <string>

#include "gpu/cuda/prefill/blocked_kernel.cuh"
#include "gpu/cuda/prefill/line_choice.h"

namespace keyhole::gpu {
namespace {

using blocked::kPitch;
using blocked::kThreads;
using blocked::power_of_2;
using blocked::quad_max;
using blocked::quad_sum;
using blocked::Seen;

constexpr int kKeys = kListRows;
constexpr uint32_t kBlocksOfRun = kLineRun / kKeys;
constexpr uint32_t kCellPitch = kKeys + 1;  ///< diagonals and columns then lie in different banks
static_assert(kMostLineQueries == 64 && kKeys == 64 && kThreads == 128);

struct Cells {
  float weights[kMostLineQueries * kCellPitch];
  float halves[kKeys];
};
template <class T, int d>
constexpr size_t kRowBytes = sizeof(T) * kPitch<d>*(kMostLineQueries + kKeys);

/// sums: columns and diagonals, by the queries' lse; else the states of which these are made.
template <class T, int d, bool sums>
__global__ void __launch_bounds__(kThreads)
    line_kernel(const __grid_constant__ BlockedParams a, const __grid_constant__ LineWeights w) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const q_rows = reinterpret_cast<T*>(memory);
  T* const k_rows = q_rows + kMostLineQueries * kPitch<d>;
  auto& cells = *reinterpret_cast<Cells*>(memory + kRowBytes<T, d>);

  const uint32_t local = blockIdx.y, head = w.first_head + local;
  if (!w.wanted.has(head)) return;
  const uint32_t kv_head = head / (a.q_heads / a.kv_heads);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t first_query = a.n - w.queries;
  const uint32_t blocks = (a.rows + kKeys - 1) / kKeys;
  const uint32_t begin = blockIdx.x * kBlocksOfRun, end = min(begin + kBlocksOfRun, blocks);
  const T* const keys = static_cast<const T*>(a.keys) + kv_head * a.head_stride;
  blocked::fetch_rows<d, kMostLineQueries>(
      q_rows, static_cast<const T*>(a.q) + first_query * a.q_token_stride + head * a.q_head_stride,
      a.q_token_stride, 0, w.queries);

  const uint32_t q_lane =
      shared_address(q_rows + (warp * 16 + lane % 16) * kPitch<d> + lane / 16 * 8);
  const uint32_t k_lane =
      shared_address(k_rows + (lane / 16 * 8 + lane % 8) * kPitch<d> + lane / 8 % 2 * 8);
  const float cap = a.logits.softcap;
  const float to_base2 = cap > 0.0F ? kLog2E : a.logits.scale * kLog2E;
  uint32_t row[2], seen[2];
  float lse[2];
  AttentionState state[2] = {AttentionState::empty(), AttentionState::empty()};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half] = warp * 16 + lane / 4 + half * 8;
    const bool there = row[half] < w.queries;
    seen[half] = there ? Seen::by(a, first_query + row[half]).to : 0;
    lse[half] = sums && there ? w.lse[local * kMostLineQueries + row[half]] : 0.0F;
  }

  for (uint32_t block = begin; block < end; ++block) {
    __syncthreads();  // all are done with the keys and the weights before
    blocked::fetch_rows<d, kKeys>(k_rows, keys, a.row_stride, block * kKeys, a.rows);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < d / 16; ++step) {
      uint32_t q[4];
      load_matrices(q, q_lane + step * 16 * sizeof(T));
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        uint32_t k[4];
        load_matrices(k, k_lane + (pair * 16 * kPitch<d> + step * 16) * sizeof(T));
        multiply_add<T>(s[2 * pair], q, k[0], k[1]);
        multiply_add<T>(s[2 * pair + 1], q, k[2], k[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = kMinusInf;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[n][2 * half + i];
          if (cap > 0.0F) x = cap * tanhf(a.logits.scale * x / cap);
          x *= to_base2;
          if (block * kKeys + n * 8 + lane % 4 * 2 + i >= seen[half]) x = kMinusInf;
          largest = fmaxf(largest, x);
        }
      }
      if constexpr (sums) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            cells.weights[row[half] * kCellPitch + n * 8 + lane % 4 * 2 + i] =
                power_of_2(s[n][2 * half + i] - lse[half]);
        }
      } else {
        largest = quad_max(largest);
        float sum = 0.0F;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) sum += power_of_2(s[n][2 * half + i] - finite_base(largest));
        }
        state[half].merge({largest, quad_sum(sum)});
      }
    }
    if constexpr (sums) {
      __syncthreads();
      const uint32_t thread = threadIdx.x, column = thread % kKeys;
      float sum = 0.0F;
#pragma unroll 8
      for (uint32_t r = 0; r < kMostLineQueries / 2; ++r)
        sum += cells.weights[(thread / kKeys * (kMostLineQueries / 2) + r) * kCellPitch + column];
      if (thread >= kKeys) cells.halves[column] = sum;
      __syncthreads();
      const uint32_t key = block * kKeys + column;
      if (thread < kKeys && key < a.rows)
        w.columns[size_t{local} * a.rows + key] = sum + cells.halves[column];
      // Diagonal number t has column - query = t - 63.
      float along = 0.0F;
      const uint32_t from = thread < kKeys ? kKeys - 1 - thread : 0;
      const uint32_t to = thread < kKeys ? kMostLineQueries : 2 * kKeys - 1 - thread;
      for (uint32_t r = from; r < to; ++r)
        along += cells.weights[r * kCellPitch + r + thread - (kKeys - 1)];
      const int64_t distance =
          int64_t{a.first} + first_query - int64_t{block} * kKeys - (int64_t{thread} - (kKeys - 1));
      if (thread < 2 * kKeys - 1 && distance >= 0 && distance < int64_t{a.rows})
        w.slashes[(size_t{block % 2} * w.heads + local) * a.rows + static_cast<size_t>(distance)] =
            along;
    }
  }
  if constexpr (!sums) {
    wait_for_copies<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 == 0)
        w.runs[(size_t{local} * gridDim.x + blockIdx.x) * kMostLineQueries + row[half]] =
            make_float2(state[half].m, state[half].d);
    }
  }
}

/// The states of all runs to one of each query; by kParts threads for each.
constexpr uint32_t kParts = 8;
__global__ void __launch_bounds__(kMostLineQueries* kParts)
    merge_kernel(const __grid_constant__ LineWeights w, uint32_t runs) {
  __shared__ AttentionState parts[kParts][kMostLineQueries];
  const uint32_t local = blockIdx.x, query = threadIdx.x % kMostLineQueries,
                 part = threadIdx.x / kMostLineQueries;
  if (!w.wanted.has(w.first_head + local)) return;
  AttentionState state = AttentionState::empty();
  for (uint32_t run = part; run < runs; run += kParts) {
    const float2 of_run = w.runs[(size_t{local} * runs + run) * kMostLineQueries + query];
    state.merge({of_run.x, of_run.y});
  }
  parts[part][query] = state;
  __syncthreads();
  if (part != 0) return;
  for (uint32_t i = 1; i < kParts; ++i) state.merge(parts[i][query]);
  // A query that does not exist gets an lse with which no weight is computed.
  w.lse[local * kMostLineQueries + query] = state.d > 0.0F ? state.log2_sum() : 0.0F;
}

template <class T, int d>
void launch(const BlockedParams& a, const LineWeights& w, cudaStream_t stream) {
  const uint32_t runs = LineWeights::runs_of(a.rows);
  const dim3 grid(runs, w.heads);
  constexpr size_t kBytes = kRowBytes<T, d>, kSumBytes = kBytes + sizeof(Cells);
  static_assert(kSumBytes <= size_t{99} << 10U);
  check(cudaFuncSetAttribute(line_kernel<T, d, false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kBytes)),
        "shared memory of columns and diagonals");
  check(cudaFuncSetAttribute(line_kernel<T, d, true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kSumBytes)),
        "shared memory of columns and diagonals");
  line_kernel<T, d, false><<<grid, kThreads, kBytes, stream>>>(a, w);
  check_launch("weights of columns and diagonals");
  merge_kernel<<<w.heads, kMostLineQueries * kParts, 0, stream>>>(w, runs);
  check_launch("weights of columns and diagonals");
  check(cudaMemsetAsync(w.slashes, 0, size_t{2} * w.heads * a.rows * sizeof(float), stream),
        "weights of diagonals");
  line_kernel<T, d, true><<<grid, kThreads, kSumBytes, stream>>>(a, w);
  check_launch("weights of columns and diagonals");
}
template <class T>
void launch_dim(const BlockedParams& a, const LineWeights& w, uint32_t dim, cudaStream_t stream) {
  switch (dim) {
    case 64: return launch<T, 64>(a, w, stream);
    case 80: return launch<T, 80>(a, w, stream);
    case 96: return launch<T, 96>(a, w, stream);
    case 128: return launch<T, 128>(a, w, stream);
    case 256: return launch<T, 256>(a, w, stream);
    default:
      throw Error(Status::invalid_argument,
                  "columns and diagonals: head dimension " + std::to_string(dim));
  }
}

}  // namespace

void LineWeights::place(std::byte* memory, uint32_t rows) {
  runs = reinterpret_cast<float2*>(memory);
  memory += size_t{heads} * runs_of(rows) * kMostLineQueries * sizeof(float2);
  lse = reinterpret_cast<float*>(memory);
  columns = lse + size_t{heads} * kMostLineQueries;
  slashes = columns + size_t{heads} * rows;
}

void launch_line_weights(const BlockedParams& piece, const LineWeights& weights, DType dtype,
                         uint32_t head_dim, cudaStream_t stream) {
  dtype == DType::f16 ? launch_dim<__half>(piece, weights, head_dim, stream)
                      : launch_dim<__nv_bfloat16>(piece, weights, head_dim, stream);
}

}  // namespace keyhole::gpu
