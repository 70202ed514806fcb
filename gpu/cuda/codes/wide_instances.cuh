// Instantiates the kernels of one head dimension for steps of many query rows, for wide_<dimension>.cu.
#pragma once

#include "gpu/cuda/codes/wide_pass.cuh"

namespace keyhole::gpu::codes {

template <int kDim, int kBits>
WideKernels wide_kernels_for_rows(uint32_t rows) {
  if (rows <= 24) return wide_pass<kDim, kBits, 3>();
  if (rows <= 32) return wide_pass<kDim, kBits, 4>();
  if (rows <= 48) return wide_pass<kDim, kBits, 6>();
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
