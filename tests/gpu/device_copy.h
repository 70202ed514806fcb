// A copy of host data in device memory, for tests of calls that take device pointers.
#pragma once

#ifdef KEYHOLE_TEST_CUDA
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <vector>

namespace keyhole::gpu {

template <class T>
class DeviceCopy {
 public:
  explicit DeviceCopy(const std::vector<T>& from) : count_(from.size()) {
    if (cudaMalloc(reinterpret_cast<void**>(&data_), (count_ + 1) * sizeof(T)) != cudaSuccess) {
      throw std::runtime_error("no device memory for a test");
    }
    (void)cudaMemcpy(data_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~DeviceCopy() { (void)cudaFree(data_); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::vector<T> read() const {
    std::vector<T> out(count_);
    (void)cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost);
    return out;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace keyhole::gpu
#endif
