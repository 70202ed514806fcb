// Instantiates the pass by warpgroups for one head dimension, for warpgroup_<dimension>.cu.
#pragma once

#include <algorithm>

#include "gpu/cuda/codes/warpgroup.cuh"

namespace keyhole::gpu::codes {

template <int kDim, int kBits, int kColumns, int kGroups>
WideKernels group_pass() {
  using Shape = GroupShape<kDim, kBits, kColumns, kGroups>;
  constexpr size_t kAlignment = 1024;  // of operands; dynamic shared memory is aligned to less
  WideKernels k;
  k.attend = reinterpret_cast<const void*>(&attend_groups_kernel<kDim, kBits, kColumns, kGroups>);
  k.fixed = sizeof(GroupShared<kDim, kBits, kColumns, kGroups>) + Shape::kMeans + kAlignment;
  k.shared = size_t{Shape::kHeads} * Shape::kStateRow * sizeof(float);
  k.stage = Shape::kStep;
  k.last = std::max<size_t>(k.stage, sizeof(typename Shape::Resident));
  k.threads = Shape::kThreads;
  k.occupancy = group_occupancy(kDim, kGroups);
  return k;
}

template <int kDim, int kBits>
WideKernels group_kernels_for_rows(uint32_t rows) {
  if constexpr (kDim > 128) {  // warpgroup_kernels.cpp says why
    if (rows <= 16) return group_pass<kDim, kBits, 2, group_count(kDim, 2)>();
  }
  if (rows <= 24) return group_pass<kDim, kBits, 3, group_count(kDim, 3)>();
  if (rows <= 32) return group_pass<kDim, kBits, 4, group_count(kDim, 4)>();
  if (rows <= 48) return group_pass<kDim, kBits, 6, group_count(kDim, 6)>();
  return {};
}

template <int kDim>
WideKernels group_kernels_for(uint32_t bits, uint32_t rows) {
  switch (bits) {
    case 2: return group_kernels_for_rows<kDim, 2>(rows);
    case 4: return group_kernels_for_rows<kDim, 4>(rows);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
