// What is said of CUDA devices in a build without CUDA.
#include "gpu/device.h"
#include "gpu/states.h"

namespace keyhole::gpu {

std::vector<DeviceInfo> cuda_devices() { return {}; }
size_t cuda_free_bytes(int) { return 0; }

std::string cuda_status() { return "built without CUDA"; }

int kernels_major(int) {
  throw Error(Status::unsupported, "kernels for a CUDA device: this build has no CUDA in it");
}

KernelLimits kernel_limits(int) {
  throw Error(Status::unsupported, "limits of a CUDA device: this build has no CUDA in it");
}

std::unique_ptr<Device> make_cuda_device(const CudaConfig&) {
  throw Error(Status::unsupported, "a CUDA device: this build has no CUDA in it");
}

void merge_states(const StateMerge&, Stream) {
  throw Error(Status::unsupported, "merging states in device memory: this build has no CUDA in it");
}

}  // namespace keyhole::gpu
