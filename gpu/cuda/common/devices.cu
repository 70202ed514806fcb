// Finds the GPUs of this machine. A machine without a driver is a normal answer, not an error.
#include <cuda_runtime_api.h>

#include "gpu/cuda/common/kernel_generation.h"
#include "gpu/device.h"

namespace keyhole::gpu {

namespace {

__global__ void compiled_with_few_instances_kernel() {}

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

// Number of devices, or the error that stands in their way.
cudaError_t count_devices(int& count) {
  count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    count = 0;
    (void)cudaGetLastError();  // do not leave it for the next CUDA call of this thread to trip over
  }
  return error;
}

}  // namespace

const void* kernel_of_few_instances() {
  return reinterpret_cast<const void*>(&compiled_with_few_instances_kernel);
}

std::span<const int> architectures_of_few_instances() { return kArchitectures; }

std::vector<DeviceInfo> cuda_devices() {
  int count = 0;
  if (count_devices(count) != cudaSuccess) return {};
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      (void)cudaGetLastError();
      continue;  // visible but unusable (for instance exclusive to another process)
    }
    devices.push_back(
        {properties.name, properties.totalGlobalMem, properties.major, properties.minor});
  }
  return devices;
}

size_t cuda_free_bytes(int ordinal) {
  int before = 0;
  size_t there = 0, all = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(ordinal) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  if (cudaMemGetInfo(&there, &all) != cudaSuccess) {
    (void)cudaGetLastError();
    there = 0;
  }
  (void)cudaSetDevice(before);
  return there;
}

std::string cuda_status() {
  int count = 0;
  switch (const cudaError_t error = count_devices(count)) {
    case cudaSuccess:
      return std::to_string(count) + (count == 1 ? " CUDA device" : " CUDA devices");
    case cudaErrorNoDevice: return "no CUDA device";
    case cudaErrorInsufficientDriver:
      return "no NVIDIA driver, or one older than CUDA " + std::to_string(CUDART_VERSION / 1000) +
             "." + std::to_string(CUDART_VERSION % 1000 / 10) + " needs";
    default: return std::string("CUDA failed: ") + cudaGetErrorString(error);
  }
}

}  // namespace keyhole::gpu
