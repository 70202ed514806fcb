// What a CUDA device says of its own speed (gpu/device_slowness.h).
#pragma once

#include "gpu/device_slowness.h"

namespace keyhole::gpu {

/// Of CUDA device `ordinal`. Throws Error(device_error).
[[nodiscard]] DeviceFigures figures_of_device(int ordinal);

}  // namespace keyhole::gpu
