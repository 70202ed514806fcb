// Programmatic dependent launch (compute capability 9.0 or newer) for the products of one token, which follow each
// other by the microsecond: each kernel is started before the one in front of it in the stream has ended, asks for
// its weights, which nothing writes, and only then waits for the writes of the kernels in front of it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace keyhole::tools {

/// Waits until the kernels in front have ended. Every block of a kernel launched by early_launch() calls it before it
/// reads what other kernels write, or writes anything.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start once all blocks of this one have called, as far as there is space.
__device__ inline void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Loads 16 bytes that are read once and shall not push the vector out of the L1 cache.
__device__ inline uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

/// Whether the current device starts kernels early: both it and their code for it have to be of 9.0 or newer. All
/// kernels here are compiled alike: the first of them that is launched on a device is asked for all.
inline cudaError_t starts_early(const void* kernel, bool& early) {
  enum Answer : uint8_t { kUnknown, kNo, kYes };
  constexpr int kMostKnown = 64;
  static std::atomic<Answer> answers[kMostKnown];
  int device = 0, major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const Answer known = device < kMostKnown ? answers[device].load() : kUnknown;
  early = known == kYes;
  if (known != kUnknown) return status;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) return status;
  cudaFuncAttributes compiled{};
  status = cudaFuncGetAttributes(&compiled, kernel);
  if (status != cudaSuccess) return status;
  early = major >= 9 && compiled.ptxVersion >= 90;
  if (device < kMostKnown) answers[device] = early ? kYes : kNo;
  return status;
}

/// Launches kernel<<<grid, block, shared, stream>>>(arguments...), early where the device can.
template <class... Parameters, class... Arguments>
cudaError_t early_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                         cudaStream_t stream, const Arguments&... arguments) {
  bool early = false;
  if (const cudaError_t status = starts_early(reinterpret_cast<const void*>(kernel), early);
      status != cudaSuccess) {
    return status;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace keyhole::tools
