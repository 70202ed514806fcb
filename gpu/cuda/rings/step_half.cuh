// Which kernel attends resident tokens in 16 bits: step_kernel_f16() and step_kernel_bf16(), which are compiled side by
// side.
#pragma once

#include "gpu/cuda/rings/share_half.cuh"
#include "gpu/cuda/rings/step.cuh"

namespace keyhole::gpu {

template <class T>
StepKernel half_step_kernel(uint32_t head_dim, uint32_t group, size_t most) {
  return step_kernel_of_dim(head_dim, [&]<int D>() {
    const StepKernel kernel = group <= 8 ? step_kernel_of<T, D, HalfShare<T, D, 1>>()
                                         : step_kernel_of<T, D, HalfShare<T, D, 2>>();
    if constexpr (D > 256) {
      if (!kernel.fits(most)) {
        return group <= 8 ? step_kernel_of<T, D, HalfShare<T, D, 1, 2>>()
                          : step_kernel_of<T, D, HalfShare<T, D, 2, 1>>();
      }
    }
    return kernel;
  });
}

}  // namespace keyhole::gpu
