#include "gpu/cuda/blocked/hopper_kernel.cuh"

namespace keyhole::gpu {

void launch_hopper_f16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream) {
  hopper::launch<__half, false>(params, head_dim, stream);
}

}  // namespace keyhole::gpu
