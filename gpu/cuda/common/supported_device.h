// Whether a device of this machine can run the kernels here.
#pragma once

#include <string>

#include "gpu/device.h"

namespace keyhole::gpu {

/// Throws Error(unsupported), which begins with `who`, unless the machine has CUDA device `ordinal` and it can run
/// these kernels (unsupported_reason()).
inline void require_device(int ordinal, const std::string& who) {
  const std::vector<DeviceInfo> devices = cuda_devices();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) {
    throw Error(Status::unsupported,
                who + ": no CUDA device " + std::to_string(ordinal) + " (" + cuda_status() + ")");
  }
  const std::string reason = unsupported_reason(devices[static_cast<size_t>(ordinal)]);
  if (!reason.empty()) throw Error(Status::unsupported, who + ": " + reason);
}

}  // namespace keyhole::gpu
