#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_4_and(uint32_t value_bits, uint32_t dim, uint32_t group) {
  switch (value_bits) {
    case 0: return unequal_kernels_for<4, 0>(dim, group);
    case 2: return unequal_kernels_for<4, 2>(dim, group);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
