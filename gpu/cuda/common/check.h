// Results of CUDA calls as errors of the project.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cpu/types.h"

namespace keyhole::gpu {

/// Throws an error that says what failed: Error(out_of_device_memory) where memory was lacking, else
/// Error(device_error). Clears the thread's last error, so that the next call does not report it again.
[[noreturn]] inline void throw_cuda_error(cudaError_t error, const char* what) {
  (void)cudaGetLastError();
  const Status status =
      error == cudaErrorMemoryAllocation ? Status::out_of_device_memory : Status::device_error;
  throw Error(status, std::string(what) + ": CUDA says '" + cudaGetErrorString(error) + "' (" +
                          cudaGetErrorName(error) + ")");
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_cuda_error(error, what);
}

/// Throws the error of the launch before it, if there was one.
inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace keyhole::gpu
