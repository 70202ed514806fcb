#include "cpu/quantise.h"

#include "tests/cpu/reference.h"

namespace keyhole::cpu::test {
namespace {

/// The error bound of the header; the quotient's own rounding adds an epsilon's worth of 127 steps.
void expect_quantised(const double* exact, uint32_t dim, const int8_t* q, float scale) {
  double largest = 0.0;
  for (uint32_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(exact[j]));
  ASSERT_NEAR(scale, largest / 127.0, largest / 127.0 * 1e-6);
  for (uint32_t j = 0; j < dim; ++j) {
    ASSERT_GE(q[j], -127);
    ASSERT_NEAR(double{scale} * q[j], exact[j], double{scale} * (0.5 + 2e-5)) << "element " << j;
  }
}

TEST(QuantiseRow, ErrorIsHalfAStepForAnyMagnitude) {
  Rng rng(41);
  for (const double sigma : {1e-30, 1e-3, 1.0, 1e4, 1e37}) {
    for (const uint32_t dim : kDims) {
      const TestRows row(1, dim, DType::f32, 0, gaussian(rng, sigma));
      const GuardedArray<int8_t> q(dim);
      const float scale =
          quantise_row(reinterpret_cast<const float*>(row.view.data), dim, q.data());
      expect_quantised(row.exact.data(), dim, q.data(), scale);
    }
  }
}

TEST(QuantiseRow, TheLargestElementIsPlusOrMinus127) {
  std::vector<float> row(64, 0.25F);
  row[10] = -3.7F;
  int8_t q[64];
  quantise_row(row.data(), 64, q);
  EXPECT_EQ(q[10], -127);
  row[11] = 3.7F;
  quantise_row(row.data(), 64, q);
  EXPECT_EQ(q[10], -127);
  EXPECT_EQ(q[11], 127);
}

TEST(QuantiseRow, TiesGoToEven) {
  std::vector<float> row(64, 0.0F);
  row[0] = 127.0F;  // scale 1
  const float in[] = {0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 125.5F};
  const int expected[] = {0, 2, 2, 0, -2, -2, 126};
  std::copy(std::begin(in), std::end(in), row.begin() + 1);
  int8_t q[64];
  EXPECT_EQ(quantise_row(row.data(), 64, q), 1.0F);
  for (int i = 0; i < 7; ++i) EXPECT_EQ(q[i + 1], expected[i]) << in[i];
}

TEST(QuantiseRow, ZerosHaveScaleZero) {
  const std::vector<float> row(80, -0.0F);
  int8_t q[80];
  std::fill(std::begin(q), std::end(q), int8_t{5});
  EXPECT_EQ(quantise_row(row.data(), 80, q), 0.0F);
  for (const int8_t x : q) EXPECT_EQ(x, 0);
}

TEST(QuantiseRow, SubnormalRowsStayWithinRange) {
  const float unit = std::numeric_limits<float>::denorm_min();
  for (int largest = 1; largest < 1000; ++largest) {
    std::vector<float> row(64, 0.0F);
    row[3] = -unit * static_cast<float>(largest);
    int8_t q[64];
    const float scale = quantise_row(row.data(), 64, q);
    EXPECT_NEAR(double{scale} * q[3], double{row[3]},
                std::max(double{scale}, double{unit} * 127) / 2)
        << largest;
  }
}

}  // namespace
}  // namespace keyhole::cpu::test
