// What decides which kernels run on a device, and so which memory a session wants there: known of a device that is not
// here, too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::gpu {

/// Of a device of which nothing is known there is nothing that it lacks.
struct KernelLimits {
  bool clusters = true;               ///< of thread blocks, as compute capability 9.0 has them
  size_t shared_of_block = SIZE_MAX;  ///< bytes of shared memory that a thread block may have
  /// That run thread blocks of one grid at once (cooperative launches); 0: the device has no such launches. Of a device
  /// that is not here as many as are wanted.
  size_t multiprocessors = SIZE_MAX;
};

/// Those of every device of a compute capability, from 8.0 on, with kernels compiled for it: as NVIDIA's table of
/// compute capabilities has them; of those that it does not have yet, all that there is.
[[nodiscard]] KernelLimits limits_of_capability(int major, int minor);

/// Those of kernels on CUDA device `ordinal`: by its attributes, by the architectures that this build's kernels were
/// compiled for (see kernels_major() of gpu/device.h), and by the environment variable KEYHOLE_CUDA_CAPABILITY. Makes
/// no context on the device, which would take hundreds of megabytes of its memory. Throws Error(invalid_argument) for
/// another text in the variable, Error(device_error), Error(unsupported) in a build without CUDA.
[[nodiscard]] KernelLimits kernel_limits(int ordinal);

}  // namespace keyhole::gpu
