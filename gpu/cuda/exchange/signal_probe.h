// How a device learns of what the host has written.
#pragma once

#include <cuda_runtime_api.h>

namespace keyhole::gpu {

/// Whether a kernel can wait for the host on this device: one is launched and must see a flag that is raised after
/// its launch. Takes some milliseconds at most. Throws Error(device_error).
[[nodiscard]] bool probe_device_wait(cudaStream_t stream);

}  // namespace keyhole::gpu
