#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_64(uint32_t bits, uint32_t group) { return kernels_for<64>(bits, group); }

}  // namespace keyhole::gpu::codes
