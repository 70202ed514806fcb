#include "gpu/cuda/common/device_figures.h"

#include "gpu/cuda/common/check.h"

namespace keyhole::gpu {

DeviceFigures figures_of_device(int ordinal) {
  const auto attribute = [ordinal](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, ordinal), "the device's attributes");
    return value;
  };
  return {attribute(cudaDevAttrComputeCapabilityMajor),
          attribute(cudaDevAttrComputeCapabilityMinor),
          attribute(cudaDevAttrClockRate),
          attribute(cudaDevAttrMultiProcessorCount),
          attribute(cudaDevAttrMemoryClockRate),
          attribute(cudaDevAttrGlobalMemoryBusWidth)};
}

}  // namespace keyhole::gpu
