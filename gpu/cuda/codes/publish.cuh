// What a step does beside its attention: it publishes q, k and v to the host, and the layer takes its new token in.
// Thread blocks of their own do it in the kernel that follows the pass; a kernel of its own in front of the pass
// would delay the pass by a trip over the bus.
#pragma once

#include "gpu/cuda/codes/resident_rows.cuh"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/exchange/host_merge.cuh"

namespace keyhole::gpu::codes {

/// Writes the rows k and v of a KV head of new token `token`, rounded to `dtype`, to `to_k` and `to_v`, both
/// `[kDim]`; by the thread block.
template <int kDim>
__device__ inline void copy_new_token(const StepParams& p, uint32_t token, uint32_t head,
                                      DType dtype, void* to_k, void* to_v) {
  constexpr uint32_t kQuads = kDim / 4;
  for (uint32_t i = threadIdx.x; i < 2 * kQuads; i += blockDim.x) {
    const TensorView& rows = i < kQuads ? p.k : p.v;
    const uint32_t at = i % kQuads * 4;
    float x[4];
    const size_t from = token * rows.token_stride + head * rows.head_stride + at;
    convert(load_raw(rows.data, rows.dtype, from), rows.dtype, x);
    store_elements(i < kQuads ? to_k : to_v, dtype, at, x);
  }
}

/// Publishes q, k and v of a KV head once the host has taken those of the step before, whose place they take.
template <int kDim>
__device__ inline void publish_head(const CodesParams& s, uint32_t head) {
  const StepParams& p = s.resident;
  wait_for_last(p, head);
  const uint32_t sequence = p.numbers[head] + 1;
  std::byte* rows = p.rows + (sequence & 1U) * p.rows_bytes;
  const uint32_t quads = p.group * (kDim / 4);
  for (uint32_t token = 0; token < p.tokens; ++token) {
    for (uint32_t i = threadIdx.x; i < quads; i += blockDim.x) {
      float x[4];
      convert(load_raw(p.q.data, p.q.dtype,
                       token * p.q.token_stride +
                           (size_t{head} * p.group + i / (kDim / 4)) * p.q.head_stride +
                           i % (kDim / 4) * 4),
              p.q.dtype, x);
      reinterpret_cast<float4*>(rows)[(size_t{token} * p.kv_heads + head) * quads + i] =
          make_float4(x[0], x[1], x[2], x[3]);
    }
    if (p.k.data == nullptr) continue;
    std::byte* k =
        rows + p.q_bytes + (size_t{token} * p.kv_heads + head) * kDim * element_bytes(p.dtype);
    copy_new_token<kDim>(p, token, head, p.dtype, k, k + p.kv_bytes);
  }
  // The barrier and the release together order the rows of all threads before the flag, with one fence over the bus.
  __syncthreads();
  if (threadIdx.x == 0) {
    store_release_system(&p.published[head].sequence, sequence);
    p.numbers[head] = sequence;
  }
}

/// Writes the layer's state and rows as they are after the step. The pass over the codes, which reads them, has
/// ended.
template <int kDim>
__device__ inline void advance_head(const CodesParams& s, uint32_t head) {
  const StepParams& p = s.resident;
  const RingState now = after_append(p, p.states[head]);
  for (uint32_t token = 0; p.k.data != nullptr && token < p.tokens; ++token) {
    const size_t row = size_t{kDim} * element_bytes(p.dtype);
    const size_t plane = (size_t{p.ring.sink} + p.ring.capacity) * row;
    const uint32_t number = now.tokens() - p.tokens + token;
    std::byte* k = p.kv + size_t{head} * 2 * plane + token_slot(p.ring, now, number) * row;
    copy_new_token<kDim>(p, token, head, p.dtype, k, k + plane);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.states[head] = now;
}

/// Does both for heads first, first + step, ...; by a thread block of a kernel that may have been launched ahead of the
/// pass's end.
template <int kDim>
__device__ inline void publish_and_advance(const CodesParams& s, uint32_t first, uint32_t step) {
  for (uint32_t head = first; head < s.kv_heads; head += step) publish_head<kDim>(s, head);
  wait_for_kernels_before();
  for (uint32_t head = first; head < s.kv_heads; head += step) advance_head<kDim>(s, head);
}

}  // namespace keyhole::gpu::codes
