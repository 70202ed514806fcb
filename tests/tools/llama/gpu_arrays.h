// Arrays on the GPU for tests of its kernels: poisoned outputs, and numbers as kernels take them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "tests/normal.h"
#include "tests/relative_error.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/split.h"

#define KEYHOLE_NEEDS_GPU()                                              \
  do {                                                                   \
    int devices = 0;                                                     \
    const cudaError_t error = cudaGetDeviceCount(&devices);              \
    if (error != cudaSuccess) GTEST_SKIP() << cudaGetErrorString(error); \
    if (devices == 0) GTEST_SKIP() << "no GPU";                          \
  } while (false)

namespace keyhole::tools::testing {

inline std::vector<float> random_floats(size_t count, float spread, std::mt19937& random) {
  keyhole::test::Normal<float> normal(0.0F, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

template <class T>
class GpuArray {
 public:
  explicit GpuArray(const std::vector<T>& values) : buffer_(values.size()) {
    cuda::copy_now(buffer_.get(), values.data(), values.size());
  }
  /// Fills all bytes with 0xFF, which is NaN in every format.
  explicit GpuArray(size_t count) : buffer_(count) {
    cuda::check(cudaMemset(buffer_.get(), 0xFF, count * sizeof(T)), "poison");
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "poison");
  }
  [[nodiscard]] T* get() const { return buffer_.get(); }
  [[nodiscard]] std::vector<T> read() const {
    cuda::check(cudaDeviceSynchronize(), "the kernel");
    std::vector<T> values(buffer_.size());
    cuda::copy_now(values.data(), buffer_.get(), values.size());
    return values;
  }

 private:
  cuda::Buffer<T> buffer_;
};

/// Numbers as sums of two bf16, and their values; without `low`, rounded to one bf16.
class SplitArray {
 public:
  explicit SplitArray(const std::vector<float>& values, bool low = true)
      : with_low_(low), high_(part(values, false)), low_(part(values, true)) {}
  /// A poisoned array.
  explicit SplitArray(size_t count) : with_low_(true), high_(count), low_(count) {}
  [[nodiscard]] cuda::Split in() const { return {high_.get(), with_low_ ? low_.get() : nullptr}; }
  [[nodiscard]] cuda::SplitOut out() const { return {high_.get(), low_.get()}; }
  [[nodiscard]] std::vector<double> read() const {
    const std::vector<__nv_bfloat16> high = high_.read();
    const std::vector<__nv_bfloat16> low = low_.read();
    std::vector<double> values(high.size());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<double>(__bfloat162float(high[i])) +
                  (with_low_ ? __bfloat162float(low[i]) : 0.0F);
    }
    return values;
  }

 private:
  static std::vector<__nv_bfloat16> part(const std::vector<float>& values, bool low) {
    std::vector<__nv_bfloat16> out;
    out.reserve(values.size());
    for (const float x : values) {
      const __nv_bfloat16 high = __float2bfloat16_rn(x);
      out.push_back(low ? __float2bfloat16_rn(x - __bfloat162float(high)) : high);
    }
    return out;
  }

  bool with_low_;
  GpuArray<__nv_bfloat16> high_, low_;
};

/// |x - y| / |y|; infinite where x has a NaN.
template <class X>
double relative_error(const std::vector<X>& x, const std::vector<double>& y) {
  EXPECT_EQ(x.size(), y.size());
  return test::relative_error(x.data(), y);
}

}  // namespace keyhole::tools::testing
