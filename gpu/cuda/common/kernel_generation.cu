// Built with the kernels of many instances, whose architectures may be others than those of all other kernels.
#include "gpu/cuda/common/kernel_generation.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

constexpr const char* kVariable = "KEYHOLE_CUDA_CAPABILITY";

__global__ void compiled_with_instances_kernel() {}

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

struct Capability {
  int major = 0, minor = 0;
};

// The numbers in text such as "8.0".
Capability capability_in(const char* text) {
  const char* const end = text + std::strlen(text);
  int major = 0, minor = 0;
  const auto [point, failed] = std::from_chars(text, end, major);
  if (failed == std::errc() && major >= 8 && major <= 99 && point != end && *point == '.') {
    const auto [rest, broken] = std::from_chars(point + 1, end, minor);
    if (broken == std::errc() && rest == end && minor >= 0 && minor <= 9) {
      return {major, minor};
    }
  }
  throw Error(Status::invalid_argument,
              std::string(kVariable) + " is '" + text +
                  "'; allowed: a compute capability from 8.0 on, such as 8.6");
}

// The capability that the environment asks for; 0.0: none.
Capability forced_capability() {
  const char* const forced = std::getenv(kVariable);
  return forced == nullptr || *forced == '\0' ? Capability{} : capability_in(forced);
}

Capability capability_of(int ordinal) {
  Capability own;
  check(cudaDeviceGetAttribute(&own.major, cudaDevAttrComputeCapabilityMajor, ordinal),
        "the device's capability");
  check(cudaDeviceGetAttribute(&own.minor, cudaDevAttrComputeCapabilityMinor, ordinal),
        "the device's capability");
  return own;
}

}  // namespace

int kernels_major(int ordinal) {
  int major = capability_of(ordinal).major;
  const DeviceScope scope(ordinal);
  for (const void* kernel : {reinterpret_cast<const void*>(&compiled_with_instances_kernel),
                             kernel_of_few_instances()}) {
    cudaFuncAttributes compiled{};
    check(cudaFuncGetAttributes(&compiled, kernel), "the kernels for this GPU");
    major = std::min(major, compiled.ptxVersion / 10);
  }
  const Capability forced = forced_capability();
  return forced.major == 0 ? major : std::min(major, forced.major);
}

KernelLimits kernel_limits(int ordinal) {
  const Capability own = capability_of(ordinal), forced = forced_capability();
  int major = own.major;
  for (const std::span<const int> compiled :
       {std::span<const int>(kArchitectures), architectures_of_few_instances()}) {
    int newest = 0;
    for (const int architecture : compiled) {
      if (architecture <= 100 * own.major + 10 * own.minor) newest = architecture;
    }
    major = std::min(major, newest / 100);
  }
  if (forced.major != 0) major = std::min(major, forced.major);
  constexpr int kClusters = 9;
  int multiprocessors = 0, at_once = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal),
        "the device's limits");
  check(cudaDeviceGetAttribute(&at_once, cudaDevAttrCooperativeLaunch, ordinal),
        "the device's limits");
  if (at_once == 0) multiprocessors = 0;
  return {major >= kClusters, shared_memory_of(ordinal).of_block,
          static_cast<size_t>(multiprocessors)};
}

SharedMemory shared_memory_of(int ordinal) {
  int of_block = 0, of_multiprocessor = 0;
  check(cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
        "the device's limits");
  check(cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                               ordinal),
        "the device's limits");
  SharedMemory memory{static_cast<size_t>(of_block), static_cast<size_t>(of_multiprocessor)};
  if (const Capability forced = forced_capability(); forced.major != 0) {
    const size_t most = std::min(limits_of_capability(forced.major, forced.minor).shared_of_block,
                                 std::numeric_limits<size_t>::max() / 2);
    memory.of_block = std::min(memory.of_block, most);
    memory.of_multiprocessor = std::min(memory.of_multiprocessor, most + kReservedOfBlock);
  }
  return memory;
}

bool kernels_have_clusters(int ordinal) { return kernels_major(ordinal) >= 9; }

bool hopper_kernels_run_on([[maybe_unused]] int ordinal) {
#ifdef KEYHOLE_HOPPER
  // No other generation has them, be it a newer one: KEYHOLE_CUDA_CAPABILITY=12.0 takes the ways of 12.0.
  const Capability own = capability_of(ordinal), forced = forced_capability();
  return own.major == 9 && own.minor == 0 && (forced.major == 0 || forced.major == 9) &&
         kernels_have_clusters(ordinal);
#else
  return false;
#endif
}

}  // namespace keyhole::gpu
