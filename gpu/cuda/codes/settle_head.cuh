// A KV head in doubt is settled by the cluster that has merged it, in the kernel that follows the pass: a kernel
// behind that one would cost every step 4 us, as the next layer's pass could not be set up while this one ends. Eight
// multiprocessors look at all codes of the head once more, which takes them two to three times as long as the pass,
// whatever the number of such heads.
//
// Phases and what they leave are those of gpu/cuda/codes/settle.cuh; a barrier of the cluster is between them, and
// each block has a split of its own.
#pragma once

#include "gpu/cuda/codes/cluster.cuh"
#include "gpu/cuda/codes/settle_phases.cuh"

namespace keyhole::gpu::codes {

/// By kBlocks thread blocks, of which this one is number `rank`, and of each the threads that a pass has. What look
/// and merge need is in the head's record. ring: of the resident tokens before the step. Not inlined: it is one for
/// all kernels of a file, and its registers are not theirs.
template <int kDim, int kBits, uint32_t kBlocks>
__device__ __noinline__ void settle_head(const CodesParams& s, uint32_t kv_head, uint32_t rank,
                                         RingState ring) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ alignas(16) unsigned char step_bytes[sizeof(CodesParams)];
  __shared__ alignas(16) unsigned char ring_bytes[sizeof(RingState)];
  auto& step = *reinterpret_cast<CodesParams*>(step_bytes);
  auto* const before = reinterpret_cast<RingState*>(ring_bytes);
  if (threadIdx.x == 0) *before = ring;
  look_again<kDim>(s, kv_head, before, step);
  const uint32_t parts = doubt_parts(s), splits = min(kBlocks, s.splits);
  const auto unit_of = [&](uint32_t part, uint32_t pass) {
    return DoubtUnit{kv_head, kv_head * s.splits, part, pass, splits};
  };
#pragma unroll 1
  for (uint32_t pass = 0; pass < kDoubtPasses; ++pass) {
#pragma unroll 1
    for (uint32_t part = 0; part < parts && rank < splits; ++part) {
      const DoubtUnit unit = unit_of(part, pass);
      if (rests(s, unit)) continue;
      const StepHeads of_part{step, kDoubtHeads * part, 0};
      attend<kDim, kBits, 1>(of_part, DoubtSplit{step, unit, rank});
      __syncthreads();
    }
    cluster_barrier();
#pragma unroll 1
    for (uint32_t part = 0; part < parts && rank < splits; ++part) {
      const DoubtUnit unit = unit_of(part, pass);
      if (rests(s, unit)) continue;
      read_found(s, unit, rank, *reinterpret_cast<FoundShared<kDim>*>(memory));
      __syncthreads();
    }
    cluster_barrier();
#pragma unroll 1
    for (uint32_t h = rank; h < s.group; h += kBlocks) {
      const DoubtUnit unit = unit_of(h / kDoubtHeads, pass);
      if (rests(s, unit)) continue;
      (void)merge_again(s, unit, h, *reinterpret_cast<MergeShared<kDim>*>(memory));
      __syncthreads();
    }
    cluster_barrier();
    bool is_last = true;
    for (uint32_t part = 0; part < parts; ++part) {
      is_last = is_last && rests(s, unit_of(part, pass + 1));
    }
    if (is_last) break;
  }
  cluster_barrier();  // nobody looks at the record any more
  if (rank == 0 && threadIdx.x == 0) close_record(s, kv_head);
}

}  // namespace keyhole::gpu::codes
