// Owners of device memory and of pinned host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "gpu/cuda/common/check.h"

namespace keyhole::gpu {

/// Device memory of the current device, uninitialised. Throws Error(out_of_device_memory).
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes);
  ~DeviceBuffer() {
    if (data_ != nullptr) (void)cudaFree(data_);
  }
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

  /// Zeroes bytes [begin, end) before anything runs that is enqueued later on any stream.
  void clear(size_t begin, size_t end) {
    if (begin == end) return;
    check(cudaMemset(data() + begin, 0, end - begin), "clearing device memory");
    check(cudaDeviceSynchronize(), "clearing device memory");
  }
  void clear() { clear(0, bytes_); }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Device memory that grows. Its content is lost when it does.
class ScratchBuffer {
 public:
  /// Makes the buffer at least `bytes` of the current device's memory. Precondition: nothing that was enqueued still
  /// uses the old memory, which is freed first, because a device may not hold both. Throws
  /// Error(out_of_device_memory); the buffer is empty then.
  std::byte* reserve(size_t bytes) {
    if (bytes <= memory_.bytes()) return memory_.data();
    memory_ = DeviceBuffer();
    memory_ = DeviceBuffer(bytes);
    return memory_.data();
  }
  template <class T>
  T* reserve_of(size_t n) {
    return reinterpret_cast<T*>(reserve(std::max<size_t>(n, 1) * sizeof(T)));
  }
  template <class T>
  [[nodiscard]] T* as() const {
    return memory_.as<T>();
  }
  [[nodiscard]] size_t bytes() const { return memory_.bytes(); }

 private:
  DeviceBuffer memory_;
};

/// Page-locked host memory, zeroed, mapped into the address space of every device. For a few MiB: it cannot be swapped
/// out, and allocating gigabytes of it takes seconds. Throws Error(out_of_memory).
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer() {
    if (data_ != nullptr) (void)cudaFreeHost(data_);
  }
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

inline DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error = cudaMalloc(&data_, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(Status::out_of_device_memory,
                "device memory: " + std::to_string(bytes) + " bytes could not be allocated");
  }
  check(error, "allocating device memory");
}

inline PinnedBuffer::PinnedBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const cudaError_t error =
      cudaHostAlloc(&data_, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw Error(Status::out_of_memory,
                "pinned host memory: " + std::to_string(bytes) + " bytes could not be allocated");
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
