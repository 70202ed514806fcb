// Steps of several sessions in one launch of each kernel: a step of a short sequence alone leaves most of the device
// idle.
//
// The pass has as many thread blocks as the device has room for. Its members share them by what they have to read, so
// that the largest number of blocks of codes per thread block is as small as possible. Thread blocks compute the
// division themselves from the counts of codes on the device: so a graph stays balanced while its sequences grow, or
// become others.
//
// CASCADE. Copies of a session have codes in common. A pass in front of the members' own passes attends these for up
// to 16 heads at once: for 4 members with groups of 4 it takes 1.7 times as long as for one. Each member then attends
// the rest of its codes, and its resident tokens, in thread blocks of its own; the states of both passes are merged
// like those of one.
//
// The kernels need compute capability 9.0 or newer; elsewhere steps go one after the other.
#pragma once

#include "gpu/cuda/codes/attend.cuh"
#include "gpu/cuda/codes/batch_params.h"
#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/resident_warps.cuh"

namespace keyhole::gpu::codes {

/// How many of `all` thread blocks each lane's work gets, by its cost: at most `most`, none for a cost of 0, and such
/// that the largest cost per thread block is as small as possible. Called by a whole warp.
__device__ inline uint32_t divided(uint32_t cost, uint32_t most, uint32_t all) {
  const auto blocks = [&](uint32_t bound) {
    // The division is rounded as IEEE says, so that where it comes out even there is no remainder.
    const float parts = ceilf(__fdiv_rn(static_cast<float>(cost), static_cast<float>(bound)));
    return min(static_cast<uint32_t>(parts), most);
  };
  const uint32_t total = __reduce_add_sync(kWholeWarp, cost);
  uint32_t low = max(total / all, 1U), high = max(__reduce_max_sync(kWholeWarp, cost), 1U);
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (__reduce_add_sync(kWholeWarp, blocks(middle)) <= all)
      high = middle;
    else
      low = middle + 1;
  }
  return blocks(high);
}

/// What the member of a lane has of both passes; the same in all warps of all kernels. Computed by a whole warp.
struct Division {
  uint32_t count = 0;   ///< blocks of codes,
  uint32_t common = 0;  ///< of which the first are the family's
  uint32_t family = 0;  ///< thread blocks of a KV head of the member's family
  uint32_t own = 0;     ///< thread blocks of a KV head of its own

  /// The division of lane `from`.
  [[nodiscard]] __device__ Division of(uint32_t from) const {
    const int lane = static_cast<int>(from);
    return {__shfl_sync(kWholeWarp, count, lane), __shfl_sync(kWholeWarp, common, lane),
            __shfl_sync(kWholeWarp, family, lane), __shfl_sync(kWholeWarp, own, lane)};
  }
};

__device__ inline Division divide(const BatchParams& batch) {
  const uint32_t lane = threadIdx.x % 32;
  const bool is_member = lane < batch.count;
  const CodesParams& s = batch.steps[is_member ? lane : 0];
  Division d;
  d.count = is_member ? __ldcv(s.block_count) : 0;
  if (batch.family_count != 0) {
    // First for the lanes of families: what their members have in common.
    const uint32_t shared =
        is_member && s.family_count != nullptr ? min(__ldcv(s.family_count), d.count) : 0;
    const Family& family = batch.families[lane < batch.family_count ? lane : 0];
    uint32_t common = shared, most = kMostSplits;
#pragma unroll
    for (uint32_t i = 0; i < Family::kMost; ++i) {
      const uint32_t member = family.members[i < family.count ? i : 0];
      const uint32_t of = __shfl_sync(kWholeWarp, shared, static_cast<int>(member));
      common = i == 0 ? of : min(common, of);
      // The states of the members' own thread blocks also need places.
      most = min(most, batch.steps[member].splits / 2);
    }
    if (lane >= batch.family_count || most == 0) common = 0;
    const uint32_t blocks = divided(common, most, batch.family_blocks);
    const uint32_t own_family = is_member ? batch.family_of[lane] : kNoFamily;
    const bool has_one = own_family != kNoFamily;
    const uint32_t of_common = __shfl_sync(kWholeWarp, common, has_one ? own_family : 0);
    const uint32_t of_blocks = __shfl_sync(kWholeWarp, blocks, has_one ? own_family : 0);
    d.common = has_one ? of_common : 0;
    d.family = has_one ? of_blocks : 0;
  }
  const uint32_t cost = is_member ? max(d.count - d.common + batch.resident_cost[lane], 1U) : 0;
  d.own = divided(cost, s.splits - d.family, batch.blocks);
  return d;
}

/// Where thread block `block` falls when the lanes' blocks are laid out one lane after the other: the number of sums
/// over lanes 0 .. own that do not reach beyond it.
struct Placed {
  uint32_t lane, first;  ///< the lane, and its first thread block
};
__device__ inline Placed place(uint32_t blocks, uint32_t block) {
  uint32_t end = blocks;
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(kWholeWarp, end, offset);
    if (threadIdx.x % 32 >= offset) end += before;
  }
  const uint32_t lane = __popc(__ballot_sync(kWholeWarp, end <= block));
  const auto from = static_cast<int>(min(lane, 31U));
  return {lane, __shfl_sync(kWholeWarp, end - blocks, from)};
}

/// The split of a thread block in a launch of several steps.
struct JointSplit {
  template <int kDim, int kHeadTiles>
  using Resident = ResidentWarps<kDim, kHeadTiles>;

  static constexpr bool kFinds = false, kLists = false;
  /// Here ptxas 13.0 finds the place in the ring to be the same in a warp, and adds it by a uniform register. In that
  /// form of a copy it forgets which register has the hint, and the device stops at an illegal instruction.
  static constexpr bool kOnce = false;
  __device__ static uint32_t kv_head() { return blockIdx.y; }

  uint32_t own, of, before, begin, end;
  [[nodiscard]] __device__ uint32_t number() const { return own; }
  [[nodiscard]] __device__ uint32_t count() const { return of; }
  [[nodiscard]] __device__ uint32_t place() const { return before + own; }
  [[nodiscard]] __device__ uint32_t first_block() const { return begin; }
  [[nodiscard]] __device__ uint32_t end_block(const CodesParams&) const { return end; }
};
/// How many splits a member has.
struct JointSplits {
  uint32_t count;
  [[nodiscard]] __device__ uint32_t of(const CodesParams&) const { return count; }
};

/// The heads of the members of a family; each member has `tiles` tiles of 4.
struct FamilyHeads {
  const BatchParams& batch;
  const Family& family;
  uint32_t tiles;  ///< 1 or 2

  static constexpr bool kHasResident = false;
  [[nodiscard]] __device__ uint32_t member(int tile) const {
    return static_cast<uint32_t>(tile) >> (tiles - 1);
  }
  [[nodiscard]] __device__ const CodesParams& step(int tile) const {
    return batch.steps[family.members[min(member(tile), family.count - 1U)]];
  }
  [[nodiscard]] __device__ uint32_t head(int tile) const {
    return 4 * (static_cast<uint32_t>(tile) & (tiles - 1));
  }
  [[nodiscard]] __device__ bool has(uint32_t h) const {
    const int tile = static_cast<int>(h / 4);
    return member(tile) < family.count && head(tile) + h % 4 < step(tile).group;
  }
  [[nodiscard]] __device__ uint32_t maxima() const { return 4 * tiles; }
};

template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32,
                                  attend_occupancy<kDim, kBits, kHeadTiles>())
    attend_families_kernel(const __grid_constant__ BatchParams batch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  wait_for_kernels_before();
  const Division d = divide(batch);
  const uint32_t lane = threadIdx.x % 32;
  const bool is_family = lane < batch.family_count;
  const Division of_first = d.of(is_family ? batch.families[lane].members[0] : 0);
  const Placed at = place(is_family ? of_first.family : 0, blockIdx.x);
  if (at.lane >= batch.family_count) return;
  const Family& family = batch.families[at.lane];
  const Division own = d.of(family.members[0]);
  const uint32_t tiles = batch.steps[family.members[0]].group > 4 ? 2 : 1;
  attend<kDim, kBits, kHeadTiles>(FamilyHeads{batch, family, tiles},
                                  JointSplit{blockIdx.x - at.first, own.family, 0, 0, own.common});
#endif
}

template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32,
                                  attend_occupancy<kDim, kBits, kHeadTiles>())
    attend_batch_kernel(const __grid_constant__ BatchParams batch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // No codes are asked for before this point: only the counts say whose codes a thread block reads.
  wait_for_kernels_before();
  const Division d = divide(batch);
  const Placed at = place(d.own, blockIdx.x);
  if (at.lane >= batch.count) return;  // one more than the members need
  const Division own = d.of(at.lane);
  const StepHeads heads{batch.steps[at.lane], 0, 4 * kHeadTiles};
  attend<kDim, kBits, kHeadTiles>(
      heads, JointSplit{blockIdx.x - at.first, own.own, own.family, own.common, own.count});
#endif
}

// Many clusters run at once: as many thread blocks per multiprocessor as have registers without spilling.
template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kFinishThreads, kDim* kHeadTiles <= 128 ? 3 : 2)
    finish_batch_kernel(const __grid_constant__ BatchParams batch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // The counts are older than the pass.
  const Division d = divide(batch).of(blockIdx.y);
  finish<kDim, kBits, kHeadTiles>(batch.steps[blockIdx.y], JointSplits{d.family + d.own},
                                  blockIdx.x / kFinishBlocks);
#endif
}

template <int kDim, int kBits, int kHeadTiles>
BatchKernels batch_kernels() {
  static_assert(!kDividesGroup<kDim>, "blockIdx.z is free");
  BatchKernels k;
  k.attend = reinterpret_cast<const void*>(&attend_batch_kernel<kDim, kBits, kHeadTiles>);
  k.finish = reinterpret_cast<const void*>(&finish_batch_kernel<kDim, kBits, kHeadTiles>);
  if constexpr (kHeadTiles == 1) {
    k.family[0] = reinterpret_cast<const void*>(&attend_families_kernel<kDim, kBits, 2>);
  }
  k.family[1] = reinterpret_cast<const void*>(&attend_families_kernel<kDim, kBits, 4>);
  return k;
}

template <int kBits>
BatchKernels batch_kernels_for(uint32_t dim, uint32_t group) {
  if (group > 8) return {};
  switch (dim) {
    case 64: return group <= 4 ? batch_kernels<64, kBits, 1>() : batch_kernels<64, kBits, 2>();
    case 128: return group <= 4 ? batch_kernels<128, kBits, 1>() : batch_kernels<128, kBits, 2>();
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
