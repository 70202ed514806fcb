#include "gpu/cuda/codes/batch.cuh"

namespace keyhole::gpu::codes {

BatchKernels batch_kernels_of_2_bits(uint32_t dim, uint32_t group) {
  return batch_kernels_for<2>(dim, group);
}

}  // namespace keyhole::gpu::codes
