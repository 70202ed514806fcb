// The kernel of a step: publishes q, k, v, attends the resident tokens, takes in the new one, and, where the
// step is one launch, waits for the host and merges.
//
// Grid (KV heads, 1 + splits): block (h, 0) publishes for its head, block (h, 1 + s) attends a share of its tokens.
// Lengths are read from device memory, so the grid is the same for every length and a graph can be replayed. The
// last block of a head to arrive merges the head's partial states and advances its copy of the layer's state: all
// blocks of the head have read it by then. The publisher is a block of its own because a fence over the bus takes a
// microsecond, which the others spend on loading; where the step is one launch, it also waits for the host.
#pragma once

#include "gpu/cuda/host_merge.cuh"
#include "gpu/cuda/share.cuh"
#include "gpu/cuda/step_kernel.h"

namespace keyhole::gpu {

/// T: the session's dtype. `state`: of the layer, before the step; its number is needed last.
template <class T, int D>
__device__ inline void publish(const StepParams& p, uint32_t head, const RingState& before) {
  constexpr uint32_t kPieces = D * sizeof(T) / 16;
  const uint32_t which = threadIdx.x / 64;
  const uint32_t piece = threadIdx.x % 64;
  const bool has_piece = p.k.data != nullptr && piece < kPieces;
  uint4 bytes{};
  if (has_piece) bytes = new_row_piece<T>(which == 0 ? p.k : p.v, head, piece);
  for (uint32_t i = threadIdx.x; i < p.group * (D / 4); i += kThreads) {
    const size_t at = (size_t{head} * p.group + i / (D / 4)) * p.q.head_stride + (i % (D / 4)) * 4;
    float x[4];
    load_elements(p.q.data, p.q.dtype, at, x);
    std::byte* rows = p.rows + ((before.sequence + 1) & 1U) * p.rows_bytes;
    reinterpret_cast<float4*>(rows)[size_t{head} * p.group * (D / 4) + i] =
        make_float4(x[0], x[1], x[2], x[3]);
  }
  if (has_piece) {
    std::byte* rows = p.rows + ((before.sequence + 1) & 1U) * p.rows_bytes;
    auto* to = reinterpret_cast<uint4*>(rows + p.q_bytes + which * p.kv_bytes) + head * kPieces;
    to[piece] = bytes;
  }
  // The barrier and the release together order the rows of all threads before the flag, with one fence over the bus.
  __syncthreads();
  if (threadIdx.x == 32) store_release_system(&p.published[head].sequence, before.sequence + 1);
}

/// The head's state from the partial ones of its splits, in their order. `weights`: `[active, group]` in shared memory.
template <int D>
__device__ inline void merge_partials(const StepParams& p, uint32_t head, uint32_t active,
                                      float2* weights) {
  __shared__ float2 totals[kMaxGroup];  // 1 / sum, lse
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const size_t first = size_t{head} * p.splits * p.group;
  const uint32_t quads = p.group * (D / 4);  // 4 components each
  const float4* const parts = reinterpret_cast<const float4*>(p.partial_o + first * D);

  // The first parts are asked for before their weights are known: a trip to L2 less on the way to the result.
  constexpr int kEarly = 8;
  float4 early[kEarly];
#pragma unroll
  for (int s = 0; s < kEarly; ++s) {
    early[s] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    if (threadIdx.x < quads && s < active) early[s] = __ldcg(parts + s * quads + threadIdx.x);
  }
  for (uint32_t i = threadIdx.x; i < active * p.group; i += kThreads) {
    weights[i] = __ldcg(p.partial_ml + first + i);
  }
  __syncthreads();
  for (uint32_t g = warp; g < p.group; g += kWarps) {
    float top = kMinusInf;
    for (uint32_t s = lane; s < active; s += 32) top = fmaxf(top, weights[s * p.group + g].x);
    for (int offset = 16; offset > 0; offset /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, offset));
    }
    const float base = top == kMinusInf ? 0.0F : top;
    float sum = 0.0F;
    for (uint32_t s = lane; s < active; s += 32) {
      float2& part = weights[s * p.group + g];
      part.x = exp2f(part.x - base);
      sum += part.x * part.y;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, offset);
    }
    if (lane == 0) {
      totals[g] = make_float2(sum == 0.0F ? 0.0F : 1.0F / sum, kLn2 * (base + log2f(sum)));
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < quads; i += kThreads) {
    const uint32_t g = i / (D / 4);
    float4 total = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    const auto add = [&](const float4& x, uint32_t s) {
      const float weight = weights[s * p.group + g].x;
      total.x += weight * x.x;
      total.y += weight * x.y;
      total.z += weight * x.z;
      total.w += weight * x.w;
    };
    uint32_t s = 0;
    if (i == threadIdx.x) {
#pragma unroll
      for (; s < kEarly; ++s) {
        if (s < active) add(early[s], s);
      }
    }
#pragma unroll 16
    for (; s < active; ++s) add(__ldcg(parts + size_t{s} * quads + i), s);
    const float2 by = totals[g];
    reinterpret_cast<float4*>(p.resident_o)[size_t{head} * quads + i] =
        make_float4(total.x * by.x, total.y * by.x, total.z * by.x, total.w * by.x);
    if (i % (D / 4) == 0) p.resident_lse[head * p.group + g] = by.y;
  }
}

/// The block that published for its head, where the step is one launch: what the host sends is fetched while the
/// others still attend, so that only the later of the two is waited for. `slot`: `[group * (D + 1)]` in shared memory.
template <int D>
__device__ inline void finish_with_host(const StepParams& p, uint32_t head, uint32_t sequence,
                                        float* slot) {
  __shared__ bool delivered;
  Waited waited;
  if (threadIdx.x == 0) {
    waited = wait_for_host(p.merge, head, sequence);
    delivered = waited.failure == FailureKind::none;
  }
  __syncthreads();
  const bool there = delivered;
  if (there) {
    const float* from = host_slot(p.merge, head);
    for (uint32_t i = threadIdx.x * 4; i < p.group * D; i += kThreads * 4) {
      *reinterpret_cast<float4*>(slot + i) = host_quad(from + i);
    }
    if (threadIdx.x < p.group) {
      slot[p.group * D + threadIdx.x] = __ldcv(from + p.group * D + threadIdx.x);
    }
  }
  if (threadIdx.x == 0) {
    while (load_acquire_device(p.ready + head) == 0) {
    }
    p.ready[head] = 0;
  }
  __syncthreads();
  merge_states<true>(p.merge, head, there ? slot : nullptr);
  if (threadIdx.x == 0) note_wait(p.merge, head, sequence, waited);
}

template <class T, int D, class Share>
__global__ void __launch_bounds__(kThreads, 2)
    resident_step(const __grid_constant__ StepParams p, int stages) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ bool last;
  wait_for_kernels_before();
  let_next_kernel_start();
  const uint32_t head = blockIdx.x;
  const uint32_t publishers = p.counts ? 1 : 0;
  const bool publishes = blockIdx.y < publishers;
  const RingState before = p.states[head];
  const RingState now = p.counts ? after_step(p.ring, before, p.k.data != nullptr) : before;
  const uint32_t split = publishes ? 0 : blockIdx.y - publishers;
  const Work w = work_of(p, now, head, split);
  if (!publishes && split < w.active) Share::run(p, shared, stages, w);

  // The one that publishes arrives at once: all that counts is that it has read the state.
  __syncthreads();
  if (threadIdx.x == 0) last = arrive(p.arrivals + head) == gridDim.y - 1;
  if (publishes) publish<T, D>(p, head, before);
  __syncthreads();
  if (last) {
    merge_partials<D>(p, head, w.active, reinterpret_cast<float2*>(shared));
    __syncthreads();
    if (threadIdx.x == 0) {
      p.arrivals[head] = 0;
      if (p.counts) p.states[head] = now;
      if (p.merges) store_release_device(p.ready + head, 1);
      if (p.done != nullptr) store_release_system(&p.done[head].sequence, p.ticket);
    }
  }
  if (publishes && p.merges) {
    __syncthreads();
    finish_with_host<D>(p, head, now.sequence, reinterpret_cast<float*>(shared));
  }
}

/// The kernel of one kind of share, for step_kernel().
template <class T, int D, class Share>
StepKernel step_kernel_of() {
  constexpr size_t kWeights = size_t{kMaxSplits} * kMaxGroup * sizeof(float2);
  constexpr size_t kSlot = kMaxGroup * (D + 1) * sizeof(float);
  StepKernel kernel;
  kernel.function = reinterpret_cast<const void*>(&resident_step<T, D, Share>);
  kernel.fixed_bytes = Share::kFixedBytes;
  kernel.stage_bytes = Share::kStageBytes;
  kernel.least_bytes = kWeights > kSlot ? kWeights : kSlot;
  return kernel;
}

}  // namespace keyhole::gpu
