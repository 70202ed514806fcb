#include "runtime/engine/device_choice.h"

namespace keyhole::runtime {

void refuse_cuda(const std::string& reason) {
  throw Error(Status::unsupported, "device KEYHOLE_DEVICE_CUDA is not available: " + reason +
                                       "; allowed: KEYHOLE_DEVICE_AUTO, KEYHOLE_DEVICE_HOST");
}

void check_device(keyhole_device device) {
  if (device != KEYHOLE_DEVICE_AUTO && device != KEYHOLE_DEVICE_HOST &&
      device != KEYHOLE_DEVICE_CUDA) {
    throw Error(Status::invalid_argument,
                "device is " + std::to_string(device) +
                    ", allowed: KEYHOLE_DEVICE_AUTO (0), KEYHOLE_DEVICE_HOST (1), "
                    "KEYHOLE_DEVICE_CUDA (2)");
  }
}

DeviceChoice choose_device(keyhole_device device, uint32_t ordinal,
                           const std::vector<gpu::DeviceInfo>& gpus, const std::string& status,
                           const std::string& why_not_model) {
  check_device(device);
  if (device == KEYHOLE_DEVICE_HOST) return {false, "as asked"};
  const bool is_wanted = device == KEYHOLE_DEVICE_CUDA;
  if (ordinal >= gpus.size()) {
    if (!is_wanted) return {false, status};
    if (gpus.empty()) refuse_cuda(status);
    throw Error(Status::invalid_argument, "device_ordinal is " + std::to_string(ordinal) +
                                              ", allowed: 0.." + std::to_string(gpus.size() - 1) +
                                              " (" + status + ")");
  }
  std::string reason = gpu::unsupported_reason(gpus[ordinal]);
  if (reason.empty()) reason = why_not_model;
  if (reason.empty()) return {true, {}};
  if (is_wanted) refuse_cuda(reason);
  return {false, reason};
}

}  // namespace keyhole::runtime
