// Instantiates the kernels of one head dimension for steps of many query rows, for wide_<dimension>.cu.
#pragma once

#include <algorithm>

#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/wide.cuh"

namespace keyhole::gpu::codes {

// As many thread blocks per multiprocessor as have shared memory: parts and KV heads are many clusters, and one that
// had to wait until another has ended would take as long again.
template <int kDim, int kBits>
__global__ void __launch_bounds__(kFinishThreads, kDim <= 128 ? 2 : 1)
    finish_parts_kernel(const __grid_constant__ WideParams p) {
  // Two have 227 KiB on Hopper, with 29 KiB each for what settles heads in doubt.
  static_assert(kDim > 128 || sizeof(FinishShared<kDim, kBits, static_cast<int>(kPartHeads / 4)>) <=
                                  (size_t{80} << 10U));
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const uint32_t cluster = blockIdx.x / kFinishBlocks, heads = p.step.kv_heads;
  const uint32_t part = min(cluster / heads, p.count);
  // The cluster behind those of the parts publishes the whole step.
  if (part == p.count) {
    let_next_kernel_start();
    publish_and_advance<kDim>(p.step, blockIdx.x % kFinishBlocks, kFinishBlocks);
    return;
  }
  finish<kDim, kBits, static_cast<int>(kPartHeads / 4)>(p.parts[part], AllSplits{},
                                                        cluster - part * heads);
#endif
}

template <int kDim, int kBits, int kColumns>
WideKernels wide_kernels() {
  using Shape = WideShape<kDim, kBits, kColumns>;
  WideKernels k;
  k.attend = reinterpret_cast<const void*>(&attend_wide_kernel<kDim, kBits, kColumns>);
  k.finish = reinterpret_cast<const void*>(&finish_parts_kernel<kDim, kBits>);
  k.occupancy = wide_occupancy<kDim, kBits, kColumns>();
  k.fixed = sizeof(WideShared<kDim, kBits, kColumns>);
  k.mean = Shape::kMeanBytes;
  k.shared = std::max(sizeof(ResidentShared<kDim, Shape::kHeads>),
                      size_t{Shape::kHeads} * Shape::kStateRow * sizeof(float));
  k.stage = Shape::kStage;
  return k;
}

template <int kDim, int kBits>
WideKernels wide_kernels_for_rows(uint32_t rows) {
  if (rows <= 24) return wide_kernels<kDim, kBits, 3>();
  if (rows <= 32) return wide_kernels<kDim, kBits, 4>();
  if (rows <= 48) return wide_kernels<kDim, kBits, 6>();
  return {};
}

template <int kDim>
WideKernels wide_kernels_for(uint32_t bits, uint32_t rows) {
  switch (bits) {
    case 2: return wide_kernels_for_rows<kDim, 2>(rows);
    case 4: return wide_kernels_for_rows<kDim, 4>(rows);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
