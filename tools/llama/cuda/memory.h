// Checks of CUDA's calls, and memory that frees itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace keyhole::tools::cuda {

/// Throws std::runtime_error that says what failed, with CUDA's reason.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // not for the next call of this thread to trip over
  throw std::runtime_error(std::string("GPU: ") + what + ": " + cudaGetErrorString(error));
}
/// Throws the error of a kernel launch, if there was one.
inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

enum class Where { device, pinned };

/// `count` elements of device or pinned host memory; not initialised.
template <class T, Where where = Where::device>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) : count_(count) {
    if (count == 0) return;
    void* data = nullptr;
    const cudaError_t error = where == Where::device ? cudaMalloc(&data, count * sizeof(T))
                                                     : cudaMallocHost(&data, count * sizeof(T));
    if (error != cudaSuccess) {
      const std::string what = "taking " + std::to_string(count * sizeof(T)) + " bytes of " +
                               (where == Where::device ? "device" : "pinned host") + " memory";
      check(error, what.c_str());
    }
    data_ = static_cast<T*>(data);
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ == nullptr) return;
    (void)(where == Where::device ? cudaFree(data_) : cudaFreeHost(data_));
  }

  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] size_t size() const { return count_; }
  [[nodiscard]] explicit operator bool() const { return data_ != nullptr; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};
template <class T>
using Pinned = Buffer<T, Where::pinned>;

/// Copies `count` elements between host and device, and waits.
template <class T>
void copy_now(T* to, const T* from, size_t count) {
  if (count == 0) return;
  check(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyDefault), "a copy");
  // From memory that is not pinned, cudaMemcpy may return while the bytes are still on their way from the driver's
  // buffer, and streams such as OwnStream do not wait for them.
  check(cudaStreamSynchronize(cudaStreamLegacy), "a copy");
}

/// A stream that waits for no other.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    check(cudaEventCreateWithFlags(&event_, flags), "an event");
  }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  [[nodiscard]] cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "an event"); }
  void wait() const { check(cudaEventSynchronize(event_), "waiting for the GPU"); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace keyhole::tools::cuda
