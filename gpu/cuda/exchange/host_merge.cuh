// Waiting for the host's state of a KV head, and merging it with what the device computed. One block of any
// size that is a multiple of 32; all its threads call it.
#pragma once

#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/exchange/step_params.h"

namespace keyhole::gpu {

/// How a wait ended, and what it took.
struct Waited {
  FailureKind failure = FailureKind::none;
  uint64_t nanoseconds = 0;
};

/// Polls a line until step `sequence` is delivered, given up, or too late. One thread.
__device__ inline Waited wait_for_line(const DeliveredLine* line, uint32_t sequence,
                                       uint64_t timeout_ns) {
  Waited waited;
  const uint64_t start = nanoseconds();
  while (true) {
    const uint64_t words = load_acquire_system(line);
    waited.nanoseconds = nanoseconds() - start;
    if (static_cast<int32_t>(static_cast<uint32_t>(words) - sequence) >= 0) return waited;
    if (static_cast<int32_t>(static_cast<uint32_t>(words >> 32U) - sequence) >= 0) {
      waited.failure = FailureKind::given_up;
      return waited;
    }
    if (waited.nanoseconds > timeout_ns) {
      waited.failure = FailureKind::timed_out;
      return waited;
    }
  }
}

/// The same of a KV head's line.
__device__ inline Waited wait_for_host(const MergeParams& m, uint32_t head, uint32_t sequence) {
  if (!m.wait) return {};
  return wait_for_line(m.delivered + head, sequence, m.timeout_ns);
}

/// Adds the wait to the sums, and notes a failure. Last in a kernel, as no other block waits for it. One thread.
__device__ inline void note_wait(const MergeParams& m, uint32_t head, uint32_t sequence,
                                 const Waited& waited) {
  if (waited.failure != FailureKind::none) {
    store_relaxed_system(&m.failure->word, failure_word(waited.failure, m.layer, head, sequence));
  }
  // One thread writes at a time; atomics, as they need not wait for what was there.
  auto* sums = reinterpret_cast<unsigned long long*>(m.waited + head);
  atomicAdd(sums, static_cast<unsigned long long>(waited.nanoseconds));
  atomicAdd(sums + 1, 1ULL);
}

/// Before q, k and v are published, where nothing waits for the host at the end of a step: a graph may hold several
/// steps of a layer, and the rows of two have space. The kernels that wait for this one hold their multiprocessors
/// meanwhile: threads that take rows must not wait for work of the device.
__device__ inline void wait_for_last(const StepParams& p, uint32_t head) {
  if (threadIdx.x == 0) {
    const uint32_t last = p.numbers[head];
    Waited waited = wait_for_host(p.merge, head, last);
    if (waited.failure == FailureKind::timed_out) waited.failure = FailureKind::untaken_in_time;
    if (waited.failure == FailureKind::given_up) waited.failure = FailureKind::untaken;
    note_wait(p.merge, head, last, waited);
  }
  __syncthreads();
}

/// 4 components of the host's state, past the caches, which are not told of what the host writes.
__device__ inline float4 host_quad(const float* from) {
  return __ldcv(reinterpret_cast<const float4*>(from));
}

/// One KV head's group of states.
struct HeadStates {
  const float* o = nullptr;    ///< `[group, head_dim]`
  const float* lse = nullptr;  ///< `[group]`
};

/// The states of a KV head where all heads' lie together.
__device__ inline HeadStates states_of(const MergeParams& m, const float* o, const float* lse,
                                       uint32_t head) {
  return {o + size_t{head} * m.group * m.head_dim, lse + head * m.group};
}
/// The host's state of a KV head in pinned memory.
__device__ inline HeadStates slot_of(const MergeParams& m, uint32_t head) {
  const auto* o = reinterpret_cast<const float*>(m.slots + head * m.slot_bytes);
  return {o, o + m.group * m.head_dim};
}

/// Merges a KV head's states (o `[group, head_dim]`, lse `[group]`, natural log): the resident one and the
/// host's, always in this order, so that the result does not depend on which came first. Writes m.out
/// `[q_heads, head_dim]` and m.lse `[q_heads]`. host.o null: there is none, the result is NaN. Pinned: the host's state
/// lies in pinned memory.
template <bool Pinned>
__device__ inline void merge_states(const MergeParams& m, uint32_t head, const HeadStates& resident,
                                    const HeadStates& host) {
  const float kNaN = __int_as_float(0x7fffffff);
  const uint32_t quads = m.head_dim / 4;

  for (uint32_t i = threadIdx.x; i < m.group * quads; i += blockDim.x) {
    const uint32_t g = i / quads;
    const uint32_t d = (i - g * quads) * 4;
    const uint32_t q_head = head * m.group + g;

    // What crosses the bus is asked for first.
    float4 host_o = make_float4(kNaN, kNaN, kNaN, kNaN);
    float host_lse = kNaN;
    if (host.o != nullptr) {
      const float* from = host.o + g * m.head_dim + d;
      host_o = Pinned ? host_quad(from) : *reinterpret_cast<const float4*>(from);
      host_lse = Pinned ? __ldcv(host.lse + g) : host.lse[g];
    }
    const float4 own_o = *reinterpret_cast<const float4*>(resident.o + g * m.head_dim + d);
    const float own_lse = resident.lse[g];

    const float base = finite_base(fmaxf(own_lse, host_lse));
    const float wr = natural_weight(own_lse, base);
    const float wh = natural_weight(host_lse, base);
    const float sum = wr + wh;
    const float scale = sum == 0.0F ? 0.0F : 1.0F / sum;
    const auto merged = [&](float r, float h) { return (wr * r + wh * h) * scale; };
    const float x[4] = {merged(own_o.x, host_o.x), merged(own_o.y, host_o.y),
                        merged(own_o.z, host_o.z), merged(own_o.w, host_o.w)};
    store_elements(m.out.data, m.out.dtype, q_head * m.out.head_stride + d, x);
    if (d == 0 && m.lse != nullptr)
      m.lse[q_head] = base + logf(sum);  // logf(0) = -inf: the empty set
  }
}

}  // namespace keyhole::gpu
