// Which instructions the kernels of this library may use on a device.
#pragma once

#include <cuda_runtime_api.h>

namespace keyhole::gpu {

/// Whether kernels on CUDA device `ordinal` run as compute capability 9.0 has them: in clusters of thread blocks, and
/// launched ahead of the end of the kernel before (see kernels_major()). Throws as kernels_major() does.
[[nodiscard]] bool kernels_have_clusters(int ordinal);

/// An empty kernel that is compiled with those outside of KEYHOLE_CUDA_INSTANCE_ARCHITECTURES, whose code for a device may be
/// older than that of the instances.
[[nodiscard]] const void* kernel_of_few_instances();

}  // namespace keyhole::gpu
