#include "gpu/cuda/codes/warpgroup_instances.cuh"

namespace keyhole::gpu::codes {

WideKernels group_kernels_of_128(uint32_t bits, uint32_t rows) {
  return group_kernels_for<128>(bits, rows);
}

}  // namespace keyhole::gpu::codes
