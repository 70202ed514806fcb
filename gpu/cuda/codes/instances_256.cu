#include "gpu/cuda/codes/instances.cuh"

namespace keyhole::gpu::codes {

Kernels kernels_of_256(uint32_t bits, uint32_t group) {
  switch (bits) {
    case 2: return kernels_for_group<256, 2>(group);
    case 4: return kernels_for_group<256, 4>(group);
    default: return {};
  }
}

}  // namespace keyhole::gpu::codes
