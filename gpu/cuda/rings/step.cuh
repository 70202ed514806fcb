// The kernel of a step: publishes q, k, v, attends the resident tokens, takes in the new one, and, where the
// step is one launch, waits for the host and merges.
//
// Reads q `[q_heads, D]`, k and v `[kv_heads, D]`, K and V `[kv_heads, 2, slots, D]`; writes resident_o `[q_heads, D]`
// and resident_lse `[q_heads]` (natural log). Partial states between blocks are AttentionState, base 2.
//
// Grid (KV heads, 1 + splits): block (h, 0) publishes for its head, block (h, 1 + s) attends a share of its tokens.
// Lengths are read from device memory, so the grid is the same for every length and a graph can be replayed. The
// last block of a head to arrive merges the head's partial states and advances its copy of the layer's state: all
// blocks of the head have read it by then. The publisher is a block of its own because a fence over the bus takes a
// microsecond, which the others spend on loading. Where the step is one launch it also waits for the host, and
// whichever of the two states comes last, the block that has it merges.
#pragma once

#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/common/grid_dependency.cuh"
#include "gpu/cuda/exchange/host_merge.cuh"
#include "gpu/cuda/rings/bad_rows.cuh"
#include "gpu/cuda/rings/share.cuh"
#include "gpu/cuda/rings/step_kernel.h"

namespace keyhole::gpu {

/// Bits of StepParams::ready: which states of a step that is one launch have arrived.
inline constexpr uint32_t kResidentReady = 1, kHostReady = 2;

/// Publishes q, k, v of a KV head; returns the step's number. T: the session's dtype.
template <class T, int D>
__device__ inline uint32_t publish(const StepParams& p, uint32_t head) {
  constexpr uint32_t kPieces = D * sizeof(T) / 16, kEach = (kPieces + 63) / 64;
  const uint32_t which = threadIdx.x / 64;
  const TensorView& kv = which == 0 ? p.k : p.v;
  const auto piece_of = [](uint32_t i) { return 64 * i + threadIdx.x % 64; };
  const auto has_piece = [&](uint32_t i) { return kv.data != nullptr && piece_of(i) < kPieces; };
  const uint32_t sequence = p.numbers[head] + 1;
  RawPiece<T> raw[kEach] = {};
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    if (has_piece(i)) raw[i] = load_piece<T>(kv, head, piece_of(i));
  }
  const uint32_t quads = p.group * (D / 4);
  const auto load_q = [&](uint32_t i) {
    return load_raw(p.q.data, p.q.dtype,
                    (size_t{head} * p.group + i / (D / 4)) * p.q.head_stride + i % (D / 4) * 4);
  };
  RawQuad q{};
  if (threadIdx.x < quads) q = load_q(threadIdx.x);

  std::byte* rows = p.rows + (sequence & 1U) * p.rows_bytes;
  for (uint32_t i = threadIdx.x; i < quads; i += kThreads) {
    float x[4];
    convert(i == threadIdx.x ? q : load_q(i), p.q.dtype, x);
    reinterpret_cast<float4*>(rows)[size_t{head} * quads + i] = make_float4(x[0], x[1], x[2], x[3]);
  }
  auto* const to = reinterpret_cast<uint4*>(rows + p.q_bytes + which * p.kv_bytes) + head * kPieces;
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    if (has_piece(i)) to[piece_of(i)] = rounded_piece<T>(raw[i], kv.dtype);
  }
  // The barrier and the release together order the rows of all threads before the flag, with one fence over the bus.
  __syncthreads();
  if (threadIdx.x == 0) {
    store_release_system(&p.published[head].sequence, sequence);
    p.numbers[head] = sequence;
  }
  return sequence;
}

/// Where merge_partials() works, in shared memory.
template <int D>
struct MergeSpace {
  float weights[kMaxSplits * kMaxDeviceGroup];  ///< `[active, group]`
  float o[kMaxDeviceGroup * D];                 ///< result `[group, D]`
  float lse[kMaxDeviceGroup];                   ///< result
};

/// The head's state from the partial ones of its splits, in their order: numerators `[active, group, D]` and states
/// `[active, group]` (base 2) become o `[group, D]`, lse `[group]` (natural log), in global memory and in `space`.
template <int D>
__device__ inline void merge_partials(const StepParams& p, uint32_t head, uint32_t active,
                                      MergeSpace<D>& space) {
  __shared__ float scales[kMaxDeviceGroup];  // 1 / d
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const size_t first = size_t{head} * p.splits * p.group;
  const uint32_t quads = p.group * (D / 4);  // 4 components each
  const float4* const parts = reinterpret_cast<const float4*>(p.partial_o + first * D);

  // All that one trip to L2 can bring is asked for at once, and before its weights are known.
  constexpr uint32_t kAtOnce = 32;
  float4 x[kAtOnce];
  const auto load = [&](uint32_t i, uint32_t from) {
#pragma unroll
    for (uint32_t s = 0; s < kAtOnce; ++s) {
      x[s] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
      if (i < quads && from + s < active) x[s] = __ldcg(parts + size_t{from + s} * quads + i);
    }
  };
  load(threadIdx.x, 0);

  for (uint32_t g = warp; g < p.group; g += kWarps) {
    constexpr uint32_t kEach = kMaxSplits / 32;
    AttentionState part[kEach];
    AttentionState all = AttentionState::empty();
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t s = lane + 32 * i;
      part[i] = AttentionState::empty();
      if (s < active) part[i] = AttentionState::from_l2(p.partial_states + first + s * p.group + g);
      all.m = fmaxf(all.m, part[i].m);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      all.m = fmaxf(all.m, __shfl_xor_sync(kWholeWarp, all.m, offset));
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t s = lane + 32 * i;
      const float weight = all.weight(part[i].m);
      if (s < active) space.weights[s * p.group + g] = weight;
      all.d += weight * part[i].d;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      all.d += __shfl_xor_sync(kWholeWarp, all.d, offset);
    }
    if (lane == 0) {
      scales[g] = all.inverse();
      space.lse[g] = all.lse();
      p.resident_lse[head * p.group + g] = space.lse[g];
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < quads; i += kThreads) {
    const uint32_t g = i / (D / 4);
    float4 total = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    for (uint32_t from = 0; from < active; from += kAtOnce) {
      if (i != threadIdx.x || from > 0) load(i, from);
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; ++s) {
        if (from + s >= active) break;
        const float weight = space.weights[(from + s) * p.group + g];
        total.x += weight * x[s].x;
        total.y += weight * x[s].y;
        total.z += weight * x[s].z;
        total.w += weight * x[s].w;
      }
    }
    const float scale = scales[g];
    total = make_float4(total.x * scale, total.y * scale, total.z * scale, total.w * scale);
    reinterpret_cast<float4*>(p.resident_o)[size_t{head} * quads + i] = total;
    reinterpret_cast<float4*>(space.o)[i] = total;
  }
  __syncthreads();
}

/// The block that published for its head, where the step is one launch: fetches what the host sends while the others
/// still attend. `kept`: `[group * (D + 1)]` in shared memory.
template <int D>
__device__ inline void take_host_state(const StepParams& p, uint32_t head, uint32_t sequence,
                                       float* kept) {
  __shared__ bool delivered;
  __shared__ bool merges;
  Waited waited;
  if (threadIdx.x == 0) {
    waited = wait_for_host(p.merge, head, sequence);
    delivered = waited.failure == FailureKind::none;
  }
  __syncthreads();
  // Not before: it would fill the device while this one waits, and keep other sessions from it.
  let_next_kernel_start();
  const uint32_t elements = p.group * D;
  const HeadStates slot = slot_of(p.merge, head);
  float* const there = p.host_states + head * host_state_stride(p.group, D);
  const float kNaN = __int_as_float(0x7fffffff);
  // Both are asked for before either is needed: a trip over the bus takes longer than all else here.
  float lse = kNaN;
  if (delivered && threadIdx.x < p.group) lse = __ldcv(slot.lse + threadIdx.x);
  for (uint32_t i = threadIdx.x * 4; i < elements; i += kThreads * 4) {
    const float4 x = delivered ? host_quad(slot.o + i) : make_float4(kNaN, kNaN, kNaN, kNaN);
    *reinterpret_cast<float4*>(kept + i) = x;
    *reinterpret_cast<float4*>(there + i) = x;
  }
  if (threadIdx.x < p.group) {
    kept[elements + threadIdx.x] = lse;
    there[elements + threadIdx.x] = lse;
  }
  __syncthreads();
  if (threadIdx.x == 0) merges = (arrive_with(p.ready + head, kHostReady) & kResidentReady) != 0;
  __syncthreads();
  if (merges) {
    if (threadIdx.x == 0) p.ready[head] = 0;
    merge_states<false>(p.merge, head, states_of(p.merge, p.resident_o, p.resident_lse, head),
                        {kept, kept + elements});
  }
  if (threadIdx.x == 0) note_wait(p.merge, head, sequence, waited);
}

/// Of a step that is one launch, the block that has the resident state of its head.
template <int D>
__device__ inline void hand_in_resident(const StepParams& p, uint32_t head,
                                        const MergeSpace<D>& space) {
  __shared__ bool merges;
  HeadStates there = slot_of(p.merge, head);
  if (p.window == 0) {
    if (threadIdx.x == 0) merges = (arrive_with(p.ready + head, kResidentReady) & kHostReady) != 0;
    __syncthreads();
    if (!merges) return;
    if (threadIdx.x == 0) p.ready[head] = 0;
    const float* const host = p.host_states + head * host_state_stride(p.group, D);
    there = {host, host + p.group * D};
  }
  merge_states<false>(p.merge, head, {space.o, space.lse}, there);
}

template <class T, int D, class Share>
__global__ void __launch_bounds__(kThreads, 2)
    resident_step(const __grid_constant__ StepParams p, int stages) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ bool last;
  wait_for_kernels_before();
  const uint32_t head = blockIdx.x;
  const uint32_t publishers = p.counts ? 1 : 0;
  if (blockIdx.y < publishers) {
    if (p.window != 0) {
      let_next_kernel_start();
      return note_bad_rows<T, D>(p, head);
    }
    if (p.waits_for_last) {
      let_next_kernel_start();
      wait_for_last(p, head);
    }
    const uint32_t sequence = publish<T, D>(p, head);
    if (p.merges) take_host_state<D>(p, head, sequence, reinterpret_cast<float*>(shared));
    return;
  }
  let_next_kernel_start();
  const RingState before = p.states[head];
  const RingState now = p.counts ? after_step(p.ring, before, p.k.data != nullptr) : before;
  const Work w = work_of(p, attended(p.ring, now, p.window), head, blockIdx.y - publishers);
  if (w.split < w.active) Share::run(p, shared, stages, w);

  __syncthreads();
  if (threadIdx.x == 0) last = arrive(p.arrivals + head) == p.splits - 1;
  __syncthreads();
  if (!last) return;
  auto& space = *reinterpret_cast<MergeSpace<D>*>(shared);
  merge_partials<D>(p, head, w.active, space);
  if (threadIdx.x == 32) {
    p.arrivals[head] = 0;
    if (p.counts) p.states[head] = now;
    if (p.done != nullptr) store_release_system(&p.done[head].sequence, p.ticket);
  }
  if (p.merges) hand_in_resident<D>(p, head, space);
}

/// The kernel of one kind of share, for step_kernel().
template <class T, int D, class Share>
StepKernel step_kernel_of() {
  StepKernel kernel;
  kernel.function = reinterpret_cast<const void*>(&resident_step<T, D, Share>);
  kernel.fixed_bytes = Share::kFixedBytes;
  kernel.stage_bytes = Share::kStageBytes;
  kernel.least_bytes = sizeof(MergeSpace<D>);  // holds a host's state, too
  return kernel;
}

/// What of_dim, a template by head dimension, has for one of the supported ones.
template <class OfDim>
StepKernel step_kernel_of_dim(uint32_t head_dim, const OfDim& of_dim) {
  switch (head_dim) {
    case 64: return of_dim.template operator()<64>();
    case 80: return of_dim.template operator()<80>();
    case 96: return of_dim.template operator()<96>();
    case 128: return of_dim.template operator()<128>();
    case 256: return of_dim.template operator()<256>();
    case 512: return of_dim.template operator()<512>();
    default: return {};
  }
}

}  // namespace keyhole::gpu
