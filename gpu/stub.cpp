// What the device interface answers in a build without CUDA.
#include "gpu/device.h"

namespace keyhole::gpu {

std::vector<DeviceInfo> cuda_devices() { return {}; }

std::string cuda_status() { return "built without CUDA"; }

std::unique_ptr<Resident> make_cuda_resident(const ResidentShape&, const CudaConfig&) {
  throw Error(Status::unsupported, "a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<Front> make_cuda_front(Resident&, const FrontShape&) {
  throw Error(Status::unsupported, "partitions on a CUDA device: this build has no CUDA in it");
}

}  // namespace keyhole::gpu
