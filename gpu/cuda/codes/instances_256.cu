#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_256(uint32_t bits, uint32_t group) { return kernels_for<256>(bits, group); }

}  // namespace keyhole::gpu::codes
