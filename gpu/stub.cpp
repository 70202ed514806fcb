// What the device interface answers in a build without CUDA.
#include "gpu/device.h"

namespace keyhole::gpu {

std::vector<DeviceInfo> cuda_devices() { return {}; }

std::string cuda_status() { return "built without CUDA"; }

}  // namespace keyhole::gpu
