#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_1_bit(uint32_t dim, uint32_t group) { return kernels_for<1>(dim, group); }

}  // namespace keyhole::gpu::codes
