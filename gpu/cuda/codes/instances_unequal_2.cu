#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_2_and(uint32_t value_bits, uint32_t dim, uint32_t group) {
  switch (value_bits) {
    case 0: return unequal_kernels_for<2, 0>(dim, group);
    case 4: return unequal_kernels_for<2, 4>(dim, group);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
