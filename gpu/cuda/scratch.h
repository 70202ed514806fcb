// What host code in this folder that searches and clusters shares: checked CUDA calls, memory that grows, a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "cpu/types.h"
#include "gpu/device.h"

namespace keyhole::gpu {

/// Throws Error(out_of_device_memory or device_error) that names `what` was being done.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // do not leave it for the next call of this thread
  const auto status =
      error == cudaErrorMemoryAllocation ? Status::out_of_device_memory : Status::device_error;
  throw Error(status, std::string(what) + ": " + cudaGetErrorString(error));
}

/// Throws Error(unsupported) unless the machine has this device and it can run what is compiled here.
inline void require_tensor_cores(int ordinal, const std::string& who) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (error != cudaSuccess || ordinal < 0 || ordinal >= devices) {
    throw Error(Status::unsupported,
                who + ": no CUDA device " + std::to_string(ordinal) + " (" + cuda_status() + ")");
  }
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
             "asking for a device's age");
  if (major < 8) {
    throw Error(Status::unsupported,
                who + ": compute capability " + std::to_string(major) + ".x, needed: 8.0 or newer");
  }
}

/// Makes a device current on this thread for the length of a scope.
class UseDevice {
 public:
  explicit UseDevice(int ordinal) {
    check_cuda(cudaGetDevice(&before_), "reading the current device");
    if (before_ != ordinal) check_cuda(cudaSetDevice(ordinal), "choosing a device");
    changed_ = before_ != ordinal;
  }
  ~UseDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Memory of the device, or pinned memory of the host, that grows and loses its content when it does.
class Scratch {
 public:
  explicit Scratch(bool pinned = false) : pinned_(pinned) {}
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// At least `bytes` of it. Nothing that was enqueued may still use the old memory.
  std::byte* reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    release();
    void* data = nullptr;
    if (pinned_) {
      check_cuda(cudaMallocHost(&data, bytes), "taking pinned memory");
    } else {
      const cudaError_t error = cudaMalloc(&data, bytes);
      if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        throw Error(Status::out_of_device_memory,
                    "device memory: " + std::to_string(bytes) + " bytes are not to be had");
      }
      check_cuda(error, "taking device memory");
    }
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
    return data_;
  }
  template <class T>
  T* reserve_of(size_t n) {
    return reinterpret_cast<T*>(reserve(std::max<size_t>(n, 1) * sizeof(T)));
  }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  void release() {
    if (data_ == nullptr) return;
    (void)(pinned_ ? cudaFreeHost(data_) : cudaFree(data_));
    data_ = nullptr;
    bytes_ = 0;
  }
  bool pinned_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class OwnStream {
 public:
  OwnStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "waiting for the device"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A mark in a stream.
class OwnEvent {
 public:
  OwnEvent() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
  }
  ~OwnEvent() { (void)cudaEventDestroy(event_); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  operator cudaEvent_t() const { return event_; }
  void record(cudaStream_t stream) const {
    check_cuda(cudaEventRecord(event_, stream), "marking a stream");
  }
  void wait() const { check_cuda(cudaEventSynchronize(event_), "waiting for the device"); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace keyhole::gpu
