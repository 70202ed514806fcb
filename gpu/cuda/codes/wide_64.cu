#include "gpu/cuda/codes/wide_instances.cuh"

namespace keyhole::gpu::codes {

WideKernels wide_kernels_of_64(uint32_t bits, uint32_t rows) {
  return wide_kernels_for<64>(bits, rows);
}

}  // namespace keyhole::gpu::codes
