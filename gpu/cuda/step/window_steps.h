// Steps of sliding layers on a CUDA device: one kernel does all of a step, and nothing of it goes to the host.
#pragma once

#include <memory>

#include "gpu/resident.h"
#include "gpu/windows.h"

namespace keyhole::gpu {

/// For the session whose resident tokens lie at `place`, which outlive it. Throws Error: invalid_argument, unsupported,
/// out_of_device_memory, out_of_memory, device_error.
[[nodiscard]] std::unique_ptr<Windows> make_cuda_windows(const ResidentPlace& place,
                                                         const WindowsShape& shape);

}  // namespace keyhole::gpu
