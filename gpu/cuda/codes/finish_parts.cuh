// What follows the pass for many query rows (gpu/cuda/codes/wide.cuh): gpu/cuda/codes/finish.cuh for all parts of a
// step in one launch, a cluster for a KV head of a part.
#pragma once

#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/wide_params.h"

namespace keyhole::gpu::codes {

// As many thread blocks per multiprocessor as have shared memory: parts and KV heads are many clusters, and one that
// had to wait until another has ended would take as long again.
template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kFinishThreads, kDim <= 128 ? 2 : 1)
    finish_parts_kernel(const __grid_constant__ WideParams p) {
  // Two have 227 KiB on Hopper, with 29 KiB each for what settles heads in doubt.
  static_assert(kDim > 128 || sizeof(FinishShared<kDim, kBits, kHeadTiles>) <= (size_t{80} << 10U));
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const uint32_t cluster = blockIdx.x / kFinishBlocks, heads = p.step.kv_heads;
  const uint32_t part = min(cluster / heads, p.count);
  // The cluster behind those of the parts publishes the whole step.
  if (part == p.count) {
    let_next_kernel_start();
    publish_and_advance<kDim>(p.step, blockIdx.x % kFinishBlocks, kFinishBlocks);
    return;
  }
  finish<kDim, kBits, kHeadTiles>(p.parts[part], AllSplits{}, cluster - part * heads);
#endif
}

}  // namespace keyhole::gpu::codes
