// Which device a thread's CUDA calls go to, and what the thread may do while a graph is recorded.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/cuda/common/check.h"

namespace keyhole::gpu {

/// Makes a device the calling thread's current one; the destructor restores the one before.
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

/// Lets the calling thread allocate and synchronise streams of its own while another stream (or thread) records a
/// graph in CUDA's default capture mode, which forbids both to every thread.
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
