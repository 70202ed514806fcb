// Rows from the host to their slots, and drafts that were accepted to theirs.
#include <algorithm>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/rings/ring_tokens.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kAppendThreads = 256;
constexpr uint32_t kMostBlocks = 512;

__global__ void __launch_bounds__(kAppendThreads)
    append_rows(const __grid_constant__ AppendParams p) {
  const uint32_t pieces = p.row_bytes / 16;
  const uint64_t token_pieces = uint64_t{p.kv_heads} * pieces;
  const size_t slots = size_t{p.ring.sink} + p.ring.capacity;
  const auto* from = reinterpret_cast<const uint4*>(p.from);
  auto* to = reinterpret_cast<uint4*>(p.kv);
  const uint64_t count = 2 * p.n * token_pieces;
  for (uint64_t i = blockIdx.x * kAppendThreads + threadIdx.x; i < count;
       i += uint64_t{gridDim.x} * kAppendThreads) {
    const uint64_t row = i / pieces;  // in [2, n, kv_heads]
    const auto head = static_cast<uint32_t>(row % p.kv_heads);
    const auto token = static_cast<uint32_t>(row / p.kv_heads % p.n);
    const uint32_t which = row / p.kv_heads >= p.n ? 1 : 0;
    const uint32_t slot = token_slot(p.ring, p.after, p.first + token);
    to[((size_t{head} * 2 + which) * slots + slot) * pieces + i % pieces] = from[i];
  }
  if (blockIdx.x > 0) return;
  for (uint32_t head = threadIdx.x; head < p.kv_heads; head += kAppendThreads) {
    p.states[head].sink = p.after.sink;
    p.states[head].begin = p.after.begin;
    p.states[head].window = p.after.window;
  }
}

/// A thread block for a KV head of a layer: rows one after the other, as each may overwrite one that comes later.
__global__ void __launch_bounds__(kAppendThreads)
    keep_newest(const __grid_constant__ KeepParams p) {
  const uint32_t layer = blockIdx.y, head = blockIdx.x;
  if ((p.takes_part[layer / 64] >> (layer % 64) & 1U) == 0) return;
  auto* const state = reinterpret_cast<RingState*>(reinterpret_cast<std::byte*>(p.states) +
                                                   layer * p.states_bytes) +
                      head;
  const RingState before = *state;
  const uint32_t first = before.tokens() - p.of, pieces = p.row_bytes / 16;
  const size_t slots = size_t{p.ring.sink} + p.ring.capacity;
  auto* const rows =
      reinterpret_cast<uint4*>(p.kv + layer * p.layer_bytes) + size_t{head} * 2 * slots * pieces;
  for (uint32_t i = 0; i < p.kept; ++i) {
    if (p.numbers[i] == i) continue;
    const size_t to = token_slot(p.ring, before, first + i),
                 from = token_slot(p.ring, before, first + p.numbers[i]);
    for (uint32_t j = threadIdx.x; j < 2 * pieces; j += kAppendThreads) {
      const size_t plane = j < pieces ? 0 : slots;
      rows[(plane + to) * pieces + j % pieces] = rows[(plane + from) * pieces + j % pieces];
    }
    __syncthreads();
  }
  __syncthreads();
  if (threadIdx.x == 0) *state = without_newest(before, p.of - p.kept);
}

}  // namespace

void launch_keep_newest(const KeepParams& params, cudaStream_t stream) {
  keep_newest<<<dim3(params.kv_heads, params.layers), kAppendThreads, 0, stream>>>(params);
  check_launch("keeping some of the newest tokens");
}

void launch_append(const AppendParams& params, cudaStream_t stream) {
  const uint64_t pieces = uint64_t{2} * params.n * params.kv_heads * (params.row_bytes / 16);
  const uint64_t blocks = (pieces + kAppendThreads - 1) / kAppendThreads;
  append_rows<<<static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, kMostBlocks)), kAppendThreads,
                0, stream>>>(params);
  check_launch("copying rows to the device");
}

}  // namespace keyhole::gpu
