// Resident attention over fp32 K and V.
#include "gpu/cuda/rings/share_float.cuh"
#include "gpu/cuda/rings/step.cuh"

namespace keyhole::gpu {

StepKernel step_kernel_f32(uint32_t head_dim, uint32_t group, size_t most) {
  return step_kernel_of_dim(head_dim, [&]<int D>() {
    if (group == 1) return step_kernel_of<float, D, FloatShare<D, 1>>();
    if (group <= 4) return step_kernel_of<float, D, FloatShare<D, 4>>();
    const StepKernel kernel = step_kernel_of<float, D, FloatShare<D, 16>>();
    if constexpr (D > 256) {
      if (!kernel.fits(most)) return step_kernel_of<float, D, FloatShare<D, 16, 1>>();
    }
    return kernel;
  });
}

}  // namespace keyhole::gpu
