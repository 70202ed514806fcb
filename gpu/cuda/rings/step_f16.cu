// Resident attention over f16 K and V.
#include "gpu/cuda/rings/step_half.cuh"

namespace keyhole::gpu {

StepKernel step_kernel_f16(uint32_t head_dim, uint32_t group, size_t most) {
  return half_step_kernel<__half>(head_dim, group, most);
}

}  // namespace keyhole::gpu
