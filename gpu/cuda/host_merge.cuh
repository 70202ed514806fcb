// Waiting for the host's state of a KV head, and merging it with what the device computed. One block of any
// size that is a multiple of 32; all its threads call it.
#pragma once

#include "gpu/cuda/device_ops.cuh"
#include "gpu/cuda/step_params.h"

namespace keyhole::gpu {

/// How a wait ended, and what it took.
struct Waited {
  FailureKind failure = FailureKind::none;
  uint64_t nanoseconds = 0;
};

/// Polls the head's line until step `sequence` is delivered, given up, or too late. One thread.
__device__ inline Waited wait_for_host(const MergeParams& m, uint32_t head, uint32_t sequence) {
  Waited waited;
  if (!m.wait) return waited;
  const uint64_t start = nanoseconds();
  while (true) {
    const uint64_t words = load_acquire_system(m.delivered + head);
    waited.nanoseconds = nanoseconds() - start;
    if (static_cast<int32_t>(static_cast<uint32_t>(words) - sequence) >= 0) return waited;
    if (static_cast<int32_t>(static_cast<uint32_t>(words >> 32U) - sequence) >= 0) {
      waited.failure = FailureKind::given_up;
      return waited;
    }
    if (waited.nanoseconds > m.timeout_ns) {
      waited.failure = FailureKind::timed_out;
      return waited;
    }
  }
}

/// Last, as nobody waits for it. One thread.
__device__ inline void note_wait(const MergeParams& m, uint32_t head, uint32_t sequence,
                                 const Waited& waited) {
  if (waited.failure != FailureKind::none) {
    store_system(&m.failure->word, failure_word(waited.failure, m.layer, head, sequence));
  }
  m.waited[head].nanoseconds += waited.nanoseconds;
  m.waited[head].merges += 1;
}

/// The host's state of a KV head in pinned memory: o `[group, head_dim]`, then lse `[group]`.
__device__ inline const float* host_slot(const MergeParams& m, uint32_t head) {
  return reinterpret_cast<const float*>(m.slots + head * m.slot_bytes);
}

/// 4 components of the host's state, and its lse, past the caches, which know nothing of what the host writes.
__device__ inline float4 host_quad(const float* from) {
  return __ldcv(reinterpret_cast<const float4*>(from));
}

/// o and lse of one KV head's group: resident, then tail, then host, in this order whatever came first. `slot`: the
/// host's state, as host_slot() has it, there or in shared memory; null where there is none: the result is NaN then.
template <bool InShared>
__device__ inline void merge_states(const MergeParams& m, uint32_t head, const float* slot) {
  const float kNaN = __int_as_float(0x7fffffff);
  const uint32_t quads = m.head_dim / 4;

  for (uint32_t i = threadIdx.x; i < m.group * quads; i += blockDim.x) {
    const uint32_t g = i / quads;
    const uint32_t d = (i - g * quads) * 4;
    const uint32_t q_head = head * m.group + g;
    const size_t at = size_t{q_head} * m.head_dim + d;

    // What crosses the bus is asked for first.
    float4 host = make_float4(kNaN, kNaN, kNaN, kNaN);
    float host_lse = kNaN;
    if (slot != nullptr) {
      const float* from = slot + g * m.head_dim + d;
      const float* from_lse = slot + m.group * m.head_dim + g;
      host = InShared ? *reinterpret_cast<const float4*>(from) : host_quad(from);
      host_lse = InShared ? *from_lse : __ldcv(from_lse);
    }
    const float4 resident = __ldcg(reinterpret_cast<const float4*>(m.resident_o + at));
    const float resident_lse = __ldcg(m.resident_lse + q_head);
    float4 tail = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    float tail_lse = kMinusInf;
    if (m.tail_o != nullptr) {
      tail = *reinterpret_cast<const float4*>(m.tail_o + at);
      tail_lse = m.tail_lse[q_head];
    }

    const float top = fmaxf(fmaxf(resident_lse, tail_lse), host_lse);
    const float base = top == kMinusInf ? 0.0F : top;  // three empty sets: weights of 0, not NaN
    const float wr = exp2f((resident_lse - base) * kLog2E);
    const float wt = exp2f((tail_lse - base) * kLog2E);
    const float wh = exp2f((host_lse - base) * kLog2E);
    const float sum = wr + wt + wh;
    const float scale = sum == 0.0F ? 0.0F : 1.0F / sum;
    const auto merged = [&](float r, float t, float h) {
      return (wr * r + wt * t + wh * h) * scale;
    };
    const float x[4] = {merged(resident.x, tail.x, host.x), merged(resident.y, tail.y, host.y),
                        merged(resident.z, tail.z, host.z), merged(resident.w, tail.w, host.w)};
    store_elements(m.out.data, m.out.dtype, q_head * m.out.head_stride + d, x);
    if (d == 0 && m.lse != nullptr)
      m.lse[q_head] = base + logf(sum);  // logf(0) = -inf: the empty set
  }
}

}  // namespace keyhole::gpu
