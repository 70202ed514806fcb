#include "gpu/cuda/codes/wide_instances.cuh"

namespace keyhole::gpu::codes {

WideKernels wide_kernels_of_256(uint32_t bits, uint32_t rows) {
  return wide_kernels_for<256>(bits, rows);
}

WideKernels small_wide_kernels_of_256(uint32_t rows) {
  if (rows <= 8) return wide_pass<256, 4, 1, true>();
  if (rows <= 16) return wide_pass<256, 4, 2, true>();
  return wide_pass<256, 4, 3, true>();
}

}  // namespace keyhole::gpu::codes
