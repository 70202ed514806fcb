// Instantiates the kernels of one head dimension for steps of many query rows, for wide_<dimension>.cu.
#pragma once

#include <algorithm>

#include "gpu/cuda/codes/finish.cuh"
#include "gpu/cuda/codes/wide.cuh"

namespace keyhole::gpu::codes {

/// Thread blocks per multiprocessor: as many as have shared memory, because parts and KV heads are many clusters, and one that
/// had to wait until another has ended would take as long again.
template <int kDim, int kHeadTiles>
constexpr int kPartsOccupancy = kDim <= 128 || kHeadTiles <= 2 ? 2 : 1;

template <int kDim, int kBits, int kHeadTiles>
__global__ void __launch_bounds__(kFinishThreads, kPartsOccupancy<kDim, kHeadTiles>)
    finish_parts_kernel(const __grid_constant__ WideParams p) {
  // Two have 227 KiB on Hopper, with 29 KiB each for what settles heads in doubt.
  static_assert(kPartsOccupancy<kDim, kHeadTiles> == 1 ||
                sizeof(FinishShared<kDim, kBits, kHeadTiles>) <= (size_t{80} << 10U));
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  uint32_t cluster = blockIdx.x / kFinishBlocks;
  if (p.publishes) {
    if (cluster == 0) {
      let_next_kernel_start();
      publish_and_advance<kDim>(p.step, blockIdx.x % kFinishBlocks, kFinishBlocks);
      return;
    }
    --cluster;
  }
  const uint32_t heads = p.step.kv_heads, part = cluster / heads;
  finish<kDim, kBits, kHeadTiles>(p.parts[part], AllSplits{}, cluster - part * heads);
#endif
}

template <int kDim, int kBits, int kColumns>
WideKernels wide_kernels() {
  using Shape = WideShape<kDim, kBits, kColumns>;
  WideKernels k;
  k.attend = reinterpret_cast<const void*>(&attend_wide_kernel<kDim, kBits, kColumns>);
  k.finish[0] = reinterpret_cast<const void*>(&finish_parts_kernel<kDim, kBits, 1>);
  k.finish[1] = reinterpret_cast<const void*>(&finish_parts_kernel<kDim, kBits, 2>);
  k.finish[2] = reinterpret_cast<const void*>(&finish_parts_kernel<kDim, kBits, 4>);
  k.occupancy = wide_occupancy<kDim, kBits, kColumns>();
  k.fixed = sizeof(WideShared<kDim, kBits, kColumns>);
  k.mean = Shape::kMeanBytes;
  k.shared = std::max(sizeof(WideResident<kDim, Shape::kHeads>),
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
