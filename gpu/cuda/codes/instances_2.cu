#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_2_bits(uint32_t dim, uint32_t group) { return kernels_for<2>(dim, group); }

}  // namespace keyhole::gpu::codes
