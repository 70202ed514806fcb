// Owners of device memory and of pinned host memory that the device sees at an address of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "gpu/cuda/check.h"

namespace keyhole::gpu {

/// Device memory of the current device, uninitialised. Throws Error(out_of_device_memory).
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    if (bytes > 0) check(cudaMalloc(&data_, bytes), "allocating device memory");
  }
  ~DeviceBuffer() { (void)cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  [[nodiscard]] T* as(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(data() + byte_offset);
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

  /// Zeroes all of it, before anything that is enqueued later on any stream.
  void clear() {
    if (bytes_ == 0) return;
    check(cudaMemset(data_, 0, bytes_), "clearing device memory");
    check(cudaDeviceSynchronize(), "clearing device memory");
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Page-locked host memory, zeroed, mapped into the address space of every device. A few MiB at most: it
/// cannot be swapped, and taking gigabytes of it takes seconds. Throws Error(out_of_memory).
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer() { (void)cudaFreeHost(data_); }
  PinnedBuffer(PinnedBuffer&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)),
        device_(std::exchange(o.device_, nullptr)),
        bytes_(std::exchange(o.bytes_, 0)) {}
  PinnedBuffer& operator=(PinnedBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(device_, o.device_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }

  /// The host's address.
  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  [[nodiscard]] T* as(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(data() + byte_offset);
  }
  /// The device's address of the same bytes.
  template <class T = std::byte>
  [[nodiscard]] T* device(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(device_) + byte_offset);
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  void* device_ = nullptr;
  size_t bytes_ = 0;
};

inline PinnedBuffer::PinnedBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error =
      cudaHostAlloc(&data_, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(Status::out_of_memory,
                "pinned host memory: " + std::to_string(bytes) + " bytes are not to be had");
  }
  check(error, "allocating pinned host memory");
  __builtin_memset(data_, 0, bytes);
  const cudaError_t mapped = cudaHostGetDevicePointer(&device_, data_, 0);
  if (mapped != cudaSuccess) {
    (void)cudaFreeHost(std::exchange(data_, nullptr));
    throw_cuda_error(mapped, "mapping pinned host memory");
  }
}

}  // namespace keyhole::gpu
