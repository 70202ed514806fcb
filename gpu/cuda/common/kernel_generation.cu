// Built with the kernels of many instances, whose architectures may be others than those of all other kernels.
#include "gpu/cuda/common/kernel_generation.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

constexpr const char* kVariable = "KEYHOLE_CUDA_CAPABILITY";

__global__ void compiled_with_instances_kernel() {}

// The major number in text such as "8.0"; the minor one is checked and makes no difference to the kernels here.
int major_in(const char* text) {
  const char* const end = text + std::strlen(text);
  int major = 0, minor = 0;
  const auto [point, failed] = std::from_chars(text, end, major);
  if (failed == std::errc() && major >= 8 && major <= 99 && point != end && *point == '.') {
    const auto [rest, broken] = std::from_chars(point + 1, end, minor);
    if (broken == std::errc() && rest == end && minor >= 0 && minor <= 9) return major;
  }
  throw Error(Status::invalid_argument,
              std::string(kVariable) + " is '" + text +
                  "'; allowed: a compute capability from 8.0 on, such as 8.6");
}

}  // namespace

int kernels_major(int ordinal) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
        "the device's capability");
  const DeviceScope scope(ordinal);
  for (const void* kernel : {reinterpret_cast<const void*>(&compiled_with_instances_kernel),
                             kernel_of_few_instances()}) {
    cudaFuncAttributes compiled{};
    check(cudaFuncGetAttributes(&compiled, kernel), "the kernels for this GPU");
    major = std::min(major, compiled.ptxVersion / 10);
  }
  const char* const forced = std::getenv(kVariable);
  return forced == nullptr || *forced == '\0' ? major : std::min(major, major_in(forced));
}

bool kernels_have_clusters(int ordinal) { return kernels_major(ordinal) >= 9; }

}  // namespace keyhole::gpu
