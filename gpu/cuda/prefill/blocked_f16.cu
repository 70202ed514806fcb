#include "gpu/cuda/prefill/blocked_kernel.cuh"

namespace keyhole::gpu {

void launch_blocked_f16(const BlockedParams& params, uint32_t head_dim, cudaStream_t stream) {
  blocked::launch<__half>(params, head_dim, stream);
}

}  // namespace keyhole::gpu
