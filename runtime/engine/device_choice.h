// Where an engine's sessions keep and attend their resident tokens: on a CUDA device or on the host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "keyhole/keyhole.h"

namespace keyhole::runtime {

struct DeviceChoice {
  bool cuda = false;   ///< else the host
  std::string reason;  ///< for the log, why the host; empty where it is CUDA
};

/// `gpus` are the machine's GPUs, `status` says in words what was found (cuda_devices(), cuda_status()).
/// KEYHOLE_DEVICE_AUTO takes GPU `ordinal` where it exists and can run sessions of the model, else the host.
/// why_not_model: unsupported_on_device(). Throws Error(unsupported) where KEYHOLE_DEVICE_CUDA cannot be had,
/// Error(invalid_argument) for a device or an ordinal that does not exist.
[[nodiscard]] DeviceChoice choose_device(keyhole_device device, uint32_t ordinal,
                                         const std::vector<gpu::DeviceInfo>& gpus,
                                         const std::string& status,
                                         const std::string& why_not_model = {});

/// Throws Error(invalid_argument) for a device that does not exist.
void check_device(keyhole_device device);
/// Throws the Error(unsupported) of KEYHOLE_DEVICE_CUDA that cannot be had.
[[noreturn]] void refuse_cuda(const std::string& reason);

}  // namespace keyhole::runtime
