// Waiting for the host's state of a KV head, and merging it with what the device computed. One block of any
// size that is a multiple of 32; all its threads call it.
#pragma once

#include "gpu/cuda/device_ops.cuh"
#include "gpu/cuda/step_params.h"

namespace keyhole::gpu {

/// Polls the head's line until step `sequence` is delivered. One thread. False: given up or timed out, and noted so.
__device__ inline bool wait_for_host(const MergeParams& m, uint32_t head, uint32_t sequence) {
  const uint64_t start = nanoseconds();
  uint64_t now = start;
  FailureKind failure = FailureKind::none;
  while (m.wait) {
    const uint64_t words = load_acquire_system(m.delivered + head);
    now = nanoseconds();
    if (static_cast<int32_t>(static_cast<uint32_t>(words) - sequence) >= 0) break;
    if (static_cast<int32_t>(static_cast<uint32_t>(words >> 32U) - sequence) >= 0) {
      failure = FailureKind::given_up;
      break;
    }
    if (now - start > m.timeout_ns) {
      failure = FailureKind::timed_out;
      break;
    }
  }
  if (failure != FailureKind::none) {
    store_system(&m.failure->word, failure_word(failure, m.layer, head, sequence));
  }
  uint64_t* sums = m.waited_sums + 2 * head;
  sums[0] += now - start;
  sums[1] += 1;
  store_system(&m.waited[head].nanoseconds, sums[0]);
  store_system(&m.waited[head].merges, sums[1]);
  return failure == FailureKind::none;
}

/// o and lse of one KV head's group: resident, then tail, then host, in this order whatever came first.
__device__ inline void merge_states(const MergeParams& m, uint32_t head, bool delivered) {
  const auto* slot = reinterpret_cast<const float*>(m.slots + head * m.slot_bytes);
  const float* slot_lse = slot + m.group * m.head_dim;
  const float kNaN = __int_as_float(0x7fffffff);
  const uint32_t quads = m.head_dim / 4;

  for (uint32_t i = threadIdx.x; i < m.group * quads; i += blockDim.x) {
    const uint32_t g = i / quads;
    const uint32_t d = (i - g * quads) * 4;
    const uint32_t q_head = head * m.group + g;
    const size_t at = size_t{q_head} * m.head_dim + d;

    // The host's rows cross the bus: ask for them first, and past the caches, which know nothing of the host.
    float4 host = make_float4(kNaN, kNaN, kNaN, kNaN);
    float host_lse = kNaN;
    if (delivered) {
      host = __ldcv(reinterpret_cast<const float4*>(slot + g * m.head_dim + d));
      host_lse = __ldcv(slot_lse + g);
    }
    const float4 resident = *reinterpret_cast<const float4*>(m.resident_o + at);
    const float resident_lse = m.resident_lse[q_head];
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
    const size_t to = q_head * m.out.head_stride + d;
    store_element(m.out.data, m.out.dtype, to, merged(resident.x, tail.x, host.x));
    store_element(m.out.data, m.out.dtype, to + 1, merged(resident.y, tail.y, host.y));
    store_element(m.out.data, m.out.dtype, to + 2, merged(resident.z, tail.z, host.z));
    store_element(m.out.data, m.out.dtype, to + 3, merged(resident.w, tail.w, host.w));
    if (d == 0 && m.lse != nullptr)
      m.lse[q_head] = base + logf(sum);  // logf(0) = -inf: the empty set
  }
}

__device__ inline void wait_and_merge(const MergeParams& m, uint32_t head, uint32_t sequence) {
  __shared__ bool delivered;
  __syncthreads();
  if (threadIdx.x == 0) delivered = wait_for_host(m, head, sequence);
  __syncthreads();
  merge_states(m, head, delivered);
}

}  // namespace keyhole::gpu
