// Functions of the CUDA driver: the library itself is not linked with the driver, which may be absent.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace keyhole::gpu {

/// The driver's function of that name as of CUDA 12.0; null: the driver has none. Function: a pointer type.
template <class Function>
[[nodiscard]] Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  constexpr unsigned kSince = 12000;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &result);
  if (status == cudaSuccess && result == cudaDriverEntryPointSuccess) {
    return reinterpret_cast<Function>(function);
  }
  (void)cudaGetLastError();
  return nullptr;
}

}  // namespace keyhole::gpu
