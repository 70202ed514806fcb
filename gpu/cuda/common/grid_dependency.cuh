// The device's side of programmatic dependent launch. The host's is launch_ahead() of gpu/cuda/common/launch.h.
#pragma once

namespace keyhole::gpu {

/// In a kernel that was launched ahead: waits until the kernels before it have ended and their writes are visible.
/// Call it first of all, in every block. Does nothing on GPUs older than 9.0, where no launch is ahead.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets a kernel that is launched ahead start now, as far as the multiprocessors have space for it.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace keyhole::gpu
