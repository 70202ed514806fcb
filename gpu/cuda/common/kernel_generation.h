// Which instructions the kernels of this library may use on a device.
#pragma once

namespace keyhole::gpu {

/// Whether kernels on CUDA device `ordinal` run as compute capability 9.0 has them: in clusters of thread blocks, and
/// launched ahead of the end of the kernel before (see kernels_major()). Throws as kernels_major() does.
[[nodiscard]] bool kernels_have_clusters(int ordinal);

}  // namespace keyhole::gpu
