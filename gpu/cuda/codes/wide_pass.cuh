// The pass for many query rows as its launches know it.
#pragma once

#include <algorithm>

#include "gpu/cuda/codes/wide.cuh"

namespace keyhole::gpu::codes {

/// The kernel, without that which follows it.
template <int kDim, int kBits, int kColumns, bool kHalves = (kDim > 256)>
WideKernels wide_pass() {
  using Shape = WideShape<kDim, kBits, kColumns, kHalves>;
  WideKernels k;
  k.attend = reinterpret_cast<const void*>(&attend_wide_kernel<kDim, kBits, kColumns, kHalves>);
  k.rows = Shape::kHeads;
  k.occupancy = wide_occupancy<kDim, kBits, kColumns>();
  k.fixed = sizeof(WideShared<kDim, kBits, kColumns>);
  k.shared = std::max(sizeof(ResidentShared<kDim, Shape::kHeads>),
                      size_t{Shape::kHeads} * Shape::kStateRow * sizeof(float));
  k.stage = Shape::kStage;
  k.mean = Shape::kMeanBytes;
  k.has_halves = Shape::kHalves;
  return k;
}

}  // namespace keyhole::gpu::codes
