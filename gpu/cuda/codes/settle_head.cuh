// A KV head in doubt is settled by the cluster that has merged it, inside the kernel that follows the pass. A kernel
// behind that one would cost every step 4 us, because the next layer's pass could not be set up while this one ends.
//
// The phases and their results are those of gpu/cuda/codes/settle.cuh. A barrier of the cluster separates them, and
// each block has a split of its own. The look is at listed pairs of tiles (gpu/cuda/codes/settle_list.cuh) where
// these are few and rounding cannot show; otherwise it is at all codes, which takes eight multiprocessors two to
// three times as long as the pass.
#pragma once

#include "gpu/cuda/codes/cluster.cuh"
#include "gpu/cuda/codes/settle_list.cuh"
#include "gpu/cuda/codes/settle_phases.cuh"

namespace keyhole::gpu::codes {

/// The number of splits of a KV head in doubt: each is a thread block of the cluster, which leaves a state. Behind
/// these states lies the one that the step had, where there is room for it.
template <uint32_t kBlocks>
__device__ inline uint32_t settle_splits(const CodesParams& s) {
  return min(kBlocks, max(s.splits - 1, 1U));
}

/// Bytes of shared memory that a kernel with settle_head() declares, or somewhat more for what lies between its arrays.
template <int kDim, int kBits>
constexpr size_t settle_fixed() {
  constexpr size_t kBetween = 64;
  const size_t look = kLooksAlone<kDim> ? 0 : attend_fixed<kDim, kBits, 1>();
  return look + sizeof(CodesParams) + sizeof(RingState) +
         (kMostPairs + kAttendWarps<kDim>)*sizeof(uint32_t) + kBetween;
}

/// Settles the KV head by kBlocks thread blocks, of which this one is number `rank`, and in each by the threads that
/// a pass has. The head's record has what look and merge need. ring: that of the resident tokens before the step. Not
/// inlined: there is one copy for all kernels of a file, and its registers are not theirs.
template <int kDim, int kBits, uint32_t kBlocks>
__device__ __noinline__ void settle_head(const CodesParams& s, uint32_t kv_head, uint32_t rank,
                                         RingState ring) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ alignas(16) unsigned char step_bytes[sizeof(CodesParams)];
  __shared__ alignas(16) unsigned char ring_bytes[sizeof(RingState)];
  __shared__ uint32_t pairs[kMostPairs], counts[kAttendWarps<kDim>];
  auto& step = *reinterpret_cast<CodesParams*>(step_bytes);
  auto* const before = reinterpret_cast<RingState*>(ring_bytes);
  if (threadIdx.x == 0) *before = ring;
  look_again<kDim>(s, kv_head, before, step);
  DoubtRecord& record = s.doubt.records[kv_head];
  const uint32_t parts = doubt_parts(s), splits = settle_splits<kBlocks>(s);
  const uint32_t own_parts = rank < splits ? parts : 0;
  // The maxima of a step with lists are not those of all codes.
  bool is_listed = s.splits > 1 && s.lists.list_capacity == 0;
  const auto unit_of = [&](uint32_t part, uint32_t pass) {
    return DoubtUnit{kv_head, kv_head * s.splits, part, pass, splits, is_listed};
  };
  const auto is_any = [&](uint32_t reasons) { return (__ldcg(&record.reasons) & reasons) != 0; };
#pragma unroll 1
  for (uint32_t pass = 0; pass < kDoubtPasses; ++pass) {
    // Merging sets kTakenAway and counting sets kMany; a barrier lies between a block's reading of one and the
    // setting of the next.
    is_listed = is_listed && pass + 1 != kDoubtPasses &&
                !is_any(DoubtRecord::kRounded | DoubtRecord::kTakenAway);
    if (is_listed) {
#pragma unroll 1
      for (uint32_t part = 0; part < own_parts; ++part) {
        const PairList list(s, unit_of(part, pass), rank, splits);
        const bool are_many = list.count(counts) > kMostPairs;
        if (are_many && threadIdx.x == 0) atomicOr(&record.reasons, DoubtRecord::kMany);
        __syncthreads();
      }
      cluster_barrier();
      is_listed = !is_any(DoubtRecord::kMany);
    }
    // The step's state already has the resident tokens.
    if (threadIdx.x == 0) step.has_resident = s.has_resident && !is_listed;
    __syncthreads();
#pragma unroll 1
    for (uint32_t part = 0; part < own_parts; ++part) {
      const DoubtUnit unit = unit_of(part, pass);
      if (rests(s, unit)) continue;
      uint32_t listed = 0;
      if (unit.is_listed) {
        const PairList list(s, unit, rank, splits);
        listed = list.count(counts);
        list.list(counts, pairs);
      }
      const StepHeads of_part{step, kDoubtHeads * part, 0};
      attend<kDim, kBits, 1>(of_part, DoubtSplit{step, unit, rank, pairs, listed});
      __syncthreads();
    }
    cluster_barrier();
#pragma unroll 1
    for (uint32_t part = 0; part < own_parts; ++part) {
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
