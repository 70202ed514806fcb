#include "gpu/cuda/codes/wide_instances.cuh"

namespace keyhole::gpu::codes {

WideKernels wide_kernels_of_80(uint32_t bits, uint32_t rows) {
  return wide_kernels_for<80>(bits, rows);
}

}  // namespace keyhole::gpu::codes
