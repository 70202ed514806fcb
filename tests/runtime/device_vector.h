// Floats in device memory.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "keyhole/keyhole.h"

namespace keyhole::test {

#define ASSERT_CUDA(call) ASSERT_EQ(cudaSuccess, (call))

class DeviceVector {
 public:
  explicit DeviceVector(size_t n) : n_(n) {
    EXPECT_EQ(cudaSuccess, cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(float)));
  }
  ~DeviceVector() { (void)cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;
  void set(const std::vector<float>& v, cudaStream_t stream) {
    EXPECT_EQ(cudaSuccess,
              cudaMemcpyAsync(data_, v.data(), n_ * sizeof(float), cudaMemcpyHostToDevice, stream));
    EXPECT_EQ(cudaSuccess, cudaStreamSynchronize(stream));
  }
  [[nodiscard]] std::vector<float> get() const {
    std::vector<float> v(n_);
    EXPECT_EQ(cudaSuccess, cudaMemcpy(v.data(), data_, n_ * sizeof(float), cudaMemcpyDeviceToHost));
    return v;
  }
  [[nodiscard]] keyhole_tensor tensor(std::initializer_list<int64_t> shape) const {
    keyhole_tensor t =
        keyhole_tensor_host(data_, KEYHOLE_F32, static_cast<int32_t>(shape.size()), shape.begin());
    t.memory = KEYHOLE_DEVICE;
    return t;
  }

 private:
  float* data_ = nullptr;
  size_t n_;
};

}  // namespace keyhole::test
