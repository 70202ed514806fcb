// Steps of several sessions in one launch of each kernel: a step of a short sequence alone leaves most of the device idle.
//
// The pass has as many thread blocks as the device has room for, and its members share them by what they have to read: the
// largest number of blocks of codes that a thread block gets is as small as it can be. Thread blocks work that out for themselves, from the
// counts of codes on the device: a graph stays balanced while its sequences grow, or become others.
//
// Kernels for compute capability 9.0 or newer alone: elsewhere steps go one after the other.
#pragma once

#include "gpu/cuda/codes/attend.cuh"
#include "gpu/cuda/codes/batch_params.h"
#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/resident_warps.cuh"

namespace keyhole::gpu::codes {

/// A lane's member: how many thread blocks of the pass a KV head of it has. By a whole warp, the same in all warps of both
/// kernels.
__device__ inline uint32_t blocks_of_lane(const BatchParams& batch) {
  const uint32_t lane = threadIdx.x % 32;
  const bool is_member = lane < batch.count;
  uint32_t cost = 0, most = 0;
  if (is_member) {
    const CodesParams& s = batch.steps[lane];
    cost = max(__ldcv(s.block_count) + batch.resident_cost[lane], 1U);
    most = s.splits;
  }
  const auto blocks = [&](uint32_t bound) {
    // Rounded as IEEE says: what divides leaves no rest.
    const float parts =
        ceilf(__fdiv_rn(static_cast<float>(cost), static_cast<float>(bound)));
    return min(static_cast<uint32_t>(parts), most);
  };
  // The smallest bound of a thread block's cost with which there are enough of them.
  const uint32_t total = __reduce_add_sync(kWholeWarp, cost);
  uint32_t low = max(total / batch.blocks, 1U), high = __reduce_max_sync(kWholeWarp, cost);
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (__reduce_add_sync(kWholeWarp, blocks(middle)) <= batch.blocks) high = middle;
    else low = middle + 1;
  }
  return blocks(high);
}

/// The split of a thread block in a launch of several steps.
struct JointSplit {
  template <int kDim, int kHeadTiles>
  using Resident = ResidentWarps<kDim, kHeadTiles>;

  uint32_t own, of;
  [[nodiscard]] __device__ uint32_t number() const { return own; }
  [[nodiscard]] __device__ uint32_t count() const { return of; }
};
/// How many splits a member has.
struct JointSplits {
  uint32_t count;
  [[nodiscard]] __device__ uint32_t of(const CodesParams&) const { return count; }
};

template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kAttendWarps<kDim> * 32,
                                  attend_resident<kDim, kBits, kBits, kHeadTiles>())
    attend_batch_kernel(const __grid_constant__ BatchParams batch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // Codes are not asked for ahead of this: whose they are is known when counts are.
  wait_for_kernels_before();
  const uint32_t blocks = blocks_of_lane(batch);
  uint32_t end = blocks;
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(kWholeWarp, end, offset);
    if (threadIdx.x % 32 >= offset) end += before;
  }
  const uint32_t member = __popc(__ballot_sync(kWholeWarp, end <= blockIdx.x));
  if (member >= batch.count) return;  // one more than the members need
  const uint32_t of = __shfl_sync(kWholeWarp, blocks, static_cast<int>(member));
  const uint32_t first = __shfl_sync(kWholeWarp, end, static_cast<int>(member)) - of;
  attend<kDim, kBits, kBits, kHeadTiles>(batch.steps[member],
                                         JointSplit{blockIdx.x - first, of});
#endif
}

// Many clusters are there at once: as many thread blocks of a multiprocessor as have registers without spilling any.
template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kFinishThreads, kDim* kHeadTiles <= 128 ? 3 : 2)
    finish_batch_kernel(const __grid_constant__ BatchParams batch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // Counts are older than the pass.
  const uint32_t count =
      __shfl_sync(kWholeWarp, blocks_of_lane(batch), static_cast<int>(blockIdx.y));
  finish<kDim, kBits, kBits, kHeadTiles>(batch.steps[blockIdx.y], JointSplits{count});
#endif
}

template <int kDim, int kBits, int kHeadTiles>
BatchKernels batch_kernels() {
  static_assert(!kDividesGroup<kDim, kBits, kBits>, "blockIdx.z is free");
  return {reinterpret_cast<const void*>(&attend_batch_kernel<kDim, kBits, kHeadTiles>),
          reinterpret_cast<const void*>(&finish_batch_kernel<kDim, kBits, kHeadTiles>)};
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
