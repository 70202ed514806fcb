// Tokens of a prompt that lie in device memory to their slots.
#include <algorithm>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/rings/bad_rows.cuh"
#include "gpu/cuda/rings/ring_tokens.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kCopyThreads = 256;
constexpr uint32_t kMostCopyBlocks = 1024;

uint32_t blocks_for(uint64_t items) {
  const uint64_t blocks = (items + kCopyThreads - 1) / kCopyThreads;
  return static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, kMostCopyBlocks));
}

/// 4 numbers of row `[token, head]`.
__device__ inline void load_quad(const TensorView& rows, uint32_t token, uint32_t head,
                                 uint32_t quad, float (&x)[4]) {
  const size_t at = token * rows.token_stride + head * rows.head_stride + quad * 4;
  convert(load_raw(rows.data, rows.dtype, at), rows.dtype, x);
}

__global__ void __launch_bounds__(kCopyThreads)
    append_tokens(const __grid_constant__ AppendTokensParams p) {
  const uint32_t quads = p.head_dim / 4;
  const size_t slots = size_t{p.ring.sink} + p.ring.capacity;
  const uint64_t count = uint64_t{2} * p.n * p.kv_heads * quads;
  for (uint64_t i = blockIdx.x * kCopyThreads + threadIdx.x; i < count;
       i += uint64_t{gridDim.x} * kCopyThreads) {
    const auto quad = static_cast<uint32_t>(i % quads);
    const uint64_t row = i / quads;  // in [2, n, kv_heads]
    const auto head = static_cast<uint32_t>(row % p.kv_heads);
    const auto token = static_cast<uint32_t>(row / p.kv_heads % p.n);
    const uint32_t which = row / p.kv_heads >= p.n ? 1 : 0;
    float x[4];
    load_quad(which == 0 ? p.k : p.v, token, head, quad, x);
    const uint32_t slot = token_slot(p.ring, p.after, p.first + token);
    store_elements(p.kv, p.dtype,
                   ((size_t{head} * 2 + which) * slots + slot) * p.head_dim + quad * 4, x);
  }
  if (blockIdx.x > 0) return;
  for (uint32_t head = threadIdx.x; head < p.kv_heads; head += kCopyThreads) {
    p.states[head].sink = p.after.sink;
    p.states[head].begin = p.after.begin;
    p.states[head].window = p.after.window;
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    find_bad(TensorView rows, uint32_t n, uint32_t heads, uint32_t head_dim, DType as,
             uint32_t* bad) {
  const uint32_t quads = head_dim / 4;
  const uint64_t count = uint64_t{n} * heads * quads;
  bool found = false;
  for (uint64_t i = blockIdx.x * kCopyThreads + threadIdx.x; i < count;
       i += uint64_t{gridDim.x} * kCopyThreads) {
    const uint64_t row = i / quads;
    float x[4];
    load_quad(rows, static_cast<uint32_t>(row / heads), static_cast<uint32_t>(row % heads),
              static_cast<uint32_t>(i % quads), x);
    round_elements(as, x);
#pragma unroll
    for (const float e : x) found = found || is_bad(e);
  }
  if (found) *bad = 1;
}

}  // namespace

void launch_append_tokens(const AppendTokensParams& params, cudaStream_t stream) {
  const uint64_t quads = uint64_t{2} * params.n * params.kv_heads * (params.head_dim / 4);
  append_tokens<<<blocks_for(quads), kCopyThreads, 0, stream>>>(params);
  check_launch("copying tokens to a sliding window");
}

void launch_find_bad(const TensorView& rows, DType as, uint32_t* bad, cudaStream_t stream) {
  const uint64_t quads = uint64_t{rows.tokens} * rows.heads * (rows.dim / 4);
  find_bad<<<blocks_for(quads), kCopyThreads, 0, stream>>>(rows, static_cast<uint32_t>(rows.tokens),
                                                           rows.heads, rows.dim, as, bad);
  check_launch("looking for a NaN");
}

}  // namespace keyhole::gpu
