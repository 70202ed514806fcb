// Results of CUDA calls as errors of the project, and the device that a thread's calls go to.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cpu/types.h"

namespace keyhole::gpu {

/// What a failed call was for, as an Error: out_of_device_memory where memory was lacking, else device_error.
/// Clears the thread's last error, so that the next call does not report it again.
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

/// After a launch: its error, if there was one.
inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

/// Makes a device the calling thread's for as long as this lives; the caller's comes back after it.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) {
    check(cudaGetDevice(&before_), "the current CUDA device");
    if (before_ == ordinal) return;
    check(cudaSetDevice(ordinal), "choosing a CUDA device");
    changed_ = true;
  }
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Lets the calling thread allocate and synchronise streams of its own while another stream (or thread)
/// records a graph in the strict default mode.
class BesideCapture {
 public:
  BesideCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace keyhole::gpu
