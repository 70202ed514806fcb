// The matrix-vector product of bench-step against double precision.
#include "tools/cuda/gemv.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/files/float16.h"
#include "tests/normal.h"

namespace keyhole::tools {
namespace {

struct Freed {
  void operator()(void* p) const { (void)cudaFree(p); }
};
using Halves = std::unique_ptr<uint16_t, Freed>;

Halves on_device(const std::vector<uint16_t>& host) {
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, host.size() * 2), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(data, host.data(), host.size() * 2, cudaMemcpyHostToDevice), cudaSuccess);
  return Halves(static_cast<uint16_t*>(data));
}

std::vector<uint16_t> on_host(const Halves& device, size_t count) {
  std::vector<uint16_t> out(count);
  EXPECT_EQ(cudaMemcpy(out.data(), device.get(), count * 2, cudaMemcpyDeviceToHost), cudaSuccess);
  return out;
}

class Gemv : public testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

TEST_F(Gemv, IsTheProduct) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  keyhole::test::Normal<float> normal;
  for (const uint32_t rows : {1U, 3U, 64U, 1021U}) {
    for (const uint32_t columns : {8U, 64U, 248U, 264U, 2048U, 4096U, 4104U, 14336U}) {
      std::vector<uint16_t> w(size_t{rows} * columns);
      std::vector<uint16_t> x(columns);
      // The upper half of a float is a bf16 number.
      for (uint16_t& h : w)
        h = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
      for (uint16_t& h : x) h = f32_to_f16(normal(random));
      const Halves dw = on_device(w);
      const Halves dx = on_device(x);
      const Halves dy = on_device(std::vector<uint16_t>(rows + 1, 0x7e01));
      ASSERT_EQ(enqueue_gemv(dw.get(), dx.get(), dy.get(), rows, columns, nullptr), cudaSuccess);
      const std::vector<uint16_t> y = on_host(dy, rows + 1);
      EXPECT_EQ(y[rows], 0x7e01);  // nothing is written beyond the rows
      for (uint32_t r = 0; r < rows; ++r) {
        double sum = 0;
        double squares = 0;
        for (uint32_t c = 0; c < columns; ++c) {
          const double product = double{bf16_to_f32(w[size_t{r} * columns + c])} * f16_to_f32(x[c]);
          sum += product;
          squares += product * product;
        }
        // Rounding to fp16, and sums in fp32 of which every partial one may be off.
        EXPECT_NEAR(f16_to_f32(y[r]), sum, 1e-3 * std::abs(sum) + 1e-5 * std::sqrt(squares) + 1e-6)
            << rows << " x " << columns << ", row " << r;
      }
    }
  }
}

TEST_F(Gemv, RandomNumbersFillTheirRange) {
  constexpr size_t kCount = 100003;
  for (const NumberType type : {NumberType::f16, NumberType::bf16}) {
    const Halves device = on_device(std::vector<uint16_t>(kCount, 0x7e01));
    ASSERT_EQ(enqueue_random(device.get(), type, kCount, 0.5F, 3, nullptr), cudaSuccess);
    double sum = 0;
    double squares = 0;
    for (const uint16_t h : on_host(device, kCount)) {
      const double x = type == NumberType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
      ASSERT_LE(std::abs(x), 0.5);
      sum += x;
      squares += x * x;
    }
    EXPECT_NEAR(sum / kCount, 0, 0.01);
    EXPECT_NEAR(squares / kCount, 0.25 / 3, 0.005);
  }
}

}  // namespace
}  // namespace keyhole::tools
