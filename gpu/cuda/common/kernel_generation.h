// Which instructions the kernels of this library may use on a device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

namespace keyhole::gpu {

/// Whether kernels on CUDA device `ordinal` run as compute capability 9.0 has them: in clusters of thread blocks, and
/// launched ahead of the end of the kernel before (see kernels_major()). Throws as kernels_major() does.
[[nodiscard]] bool kernels_have_clusters(int ordinal);

/// Whether kernels by the instructions that compute capability 9.0 alone has, Hopper's tensor cores among them, were
/// compiled (KEYHOLE_HOPPER) and run on CUDA device `ordinal`: one of 9.0, with no other generation in
/// KEYHOLE_CUDA_CAPABILITY. Throws as kernels_major() does.
[[nodiscard]] bool hopper_kernels_run_on(int ordinal);

/// Bytes of shared memory that a thread block of a device may have, and that a multiprocessor has for all of its own,
/// of which the runtime takes kReservedOfBlock for each.
struct SharedMemory {
  size_t of_block = 0, of_multiprocessor = 0;
};
inline constexpr size_t kReservedOfBlock = 1024;
/// Those of CUDA device `ordinal`, or those of the compute capability in KEYHOLE_CUDA_CAPABILITY where that has less:
/// "8.6" gives every kernel of a larger device the 99 KiB that GPUs for desktops have. Throws as kernels_major() does.
[[nodiscard]] SharedMemory shared_memory_of(int ordinal);

/// An empty kernel that is compiled with those outside of KEYHOLE_CUDA_INSTANCE_ARCHITECTURES, whose code for a device
/// may be older than that of the instances.
[[nodiscard]] const void* kernel_of_few_instances();
/// The virtual architectures that it was compiled for, ascending, a hundred times their compute capability.
[[nodiscard]] std::span<const int> architectures_of_few_instances();

}  // namespace keyhole::gpu
