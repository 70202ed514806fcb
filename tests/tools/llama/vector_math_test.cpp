// The decoder's array loops against double precision, for every length around the vector width.
#include "tools/llama/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <vector>

#include "runtime/files/float16.h"
#include "tests/normal.h"

namespace keyhole::tools {
namespace {

constexpr size_t kLongest = 70;  // four vectors of 16 and every remainder

std::vector<float> normal_values(size_t n, float spread, std::mt19937& random) {
  keyhole::test::Normal<float> normal(0.0F, spread);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(VectorMath, RmsNorm) {
  std::mt19937 random(1);
  for (size_t n = 1; n <= kLongest; ++n) {
    const std::vector<float> x = normal_values(n, 3.0F, random);
    const std::vector<float> weight = normal_values(n, 1.0F, random);
    std::vector<float> out(n);
    rms_norm(x.data(), weight.data(), n, 1e-5F, out.data());
    double squares = 0.0;
    for (const float value : x) squares += static_cast<double>(value) * value;
    const double norm = std::sqrt(squares / static_cast<double>(n) + 1e-5);
    for (size_t i = 0; i < n; ++i) {
      const double expected = x[i] / norm * weight[i];
      EXPECT_NEAR(out[i], expected, 1e-6 * (1.0 + std::abs(expected))) << "n " << n;
    }
    std::vector<float> in_place = x;
    rms_norm(in_place.data(), weight.data(), n, 1e-5F, in_place.data());
    EXPECT_EQ(in_place, out);
  }
}

TEST(VectorMath, RmsNormOfZerosIsZero) {
  const std::vector<float> zeros(20, 0.0F), ones(20, 1.0F);
  std::vector<float> out(20, 7.0F);
  rms_norm(zeros.data(), ones.data(), 20, 1e-5F, out.data());
  EXPECT_EQ(out, zeros);
}

TEST(VectorMath, MatrixVectorForAnyRangeOfRows) {
  std::mt19937 random(2);
  for (size_t cols = 1; cols <= kLongest; cols += 3) {
    constexpr size_t kRows = 11;
    const std::vector<float> matrix = normal_values(kRows * cols, 1.0F, random);
    const std::vector<float> x = normal_values(cols, 1.0F, random);
    for (size_t first = 0; first < kRows; ++first) {
      for (size_t last = first; last <= kRows; ++last) {
        std::vector<float> y(kRows, -9.0F);
        matrix_vector(matrix.data(), cols, x.data(), first, last, y.data());
        for (size_t row = 0; row < kRows; ++row) {
          if (row < first || row >= last) {
            EXPECT_EQ(y[row], -9.0F);
            continue;
          }
          double expected = 0.0;
          for (size_t i = 0; i < cols; ++i) {
            expected += static_cast<double>(matrix[row * cols + i]) * x[i];
          }
          EXPECT_NEAR(y[row], expected, 3e-5) << cols << " cols, row " << row;
        }
      }
    }
  }
}

/// Values that `Half` can hold, and their bits.
template <class Half>
struct Rounded;
template <>
struct Rounded<BFloat16> {
  static BFloat16 of(float x) { return {static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16)}; }
  static double value(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
};
template <>
struct Rounded<Float16> {
  static Float16 of(float x) { return {f32_to_f16(x)}; }
  static double value(Float16 x) { return f16_to_f32(x.bits); }
};

template <class Half>
class VectorMathOf : public ::testing::Test {};
using HalfTypes = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(VectorMathOf, HalfTypes);

TYPED_TEST(VectorMathOf, EveryNumberIsExactInFp32) {
  std::vector<TypeParam> halves;
  for (uint32_t bits = 0; bits < 65536; ++bits) halves.push_back({static_cast<uint16_t>(bits)});
  std::vector<float> out(halves.size());
  to_f32(halves.data(), halves.size(), out.data());
  for (size_t i = 0; i < halves.size(); ++i) {
    const double expected = Rounded<TypeParam>::value(halves[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
    } else {
      ASSERT_EQ(out[i], expected) << i;
      ASSERT_EQ(std::signbit(out[i]), std::signbit(expected)) << i;
    }
  }
  // And in the scalar rest of an array.
  float some[3];
  to_f32(halves.data() + 0x0002, 3, some);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(some[i], Rounded<TypeParam>::value(halves[2 + i]));
}

TYPED_TEST(VectorMathOf, MatrixVectorAndItsTranspose) {
  std::mt19937 random(6);
  std::vector<size_t> widths;
  for (size_t cols = 1; cols <= kLongest; ++cols) widths.push_back(cols);
  // Around the 512 numbers of a row that are widened at once.
  widths.insert(widths.end(), {511, 512, 513, 1024, 1025, 1500});
  for (const size_t cols : widths) {
    constexpr size_t kRows = 7;
    const double tolerance = 3e-5 * std::max(1.0, static_cast<double>(cols) / 100.0);
    std::vector<TypeParam> matrix;
    for (const float weight : normal_values(kRows * cols, 1.0F, random)) {
      matrix.push_back(Rounded<TypeParam>::of(weight));
    }
    const std::vector<float> x = normal_values(cols, 1.0F, random);
    const std::vector<float> factors = normal_values(kRows, 1.0F, random);
    std::vector<float> y(kRows), sum(cols, 0.5F);
    matrix_vector(matrix.data(), cols, x.data(), 0, kRows, y.data());
    add_rows(matrix.data(), cols, factors.data(), kRows, sum.data());
    std::vector<double> expected_sum(cols, 0.5);
    for (size_t row = 0; row < kRows; ++row) {
      double expected = 0.0;
      for (size_t i = 0; i < cols; ++i) {
        const double weight = Rounded<TypeParam>::value(matrix[row * cols + i]);
        expected += weight * x[i];
        expected_sum[i] += weight * factors[row];
      }
      EXPECT_NEAR(y[row], expected, tolerance) << cols << " cols";
    }
    for (size_t i = 0; i < cols; ++i) EXPECT_NEAR(sum[i], expected_sum[i], 1e-5) << cols;
  }
}

// The conversion of processors without F16C, which those that run tests have.
TEST(VectorMath, HalvesAreExactByIntegersToo) {
  std::vector<Float16> halves;
  for (uint32_t bits = 0; bits < 65536; ++bits) halves.push_back({static_cast<uint16_t>(bits)});
  std::vector<float> out(halves.size());
  to_f32_by_integers(halves.data(), halves.size(), out.data());
  for (size_t i = 0; i < halves.size(); ++i) {
    const auto expected = static_cast<float>(Rounded<Float16>::value(halves[i]));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  }
}

TEST(VectorMath, AddRowsInFp32) {
  std::mt19937 random(8);
  for (size_t cols = 1; cols <= kLongest; cols += 5) {
    for (size_t rows = 0; rows <= 9; ++rows) {
      const std::vector<float> matrix = normal_values(rows * cols, 1.0F, random);
      const std::vector<float> factors = normal_values(rows, 1.0F, random);
      std::vector<float> sum(cols, -1.0F);
      add_rows(matrix.data(), cols, factors.data(), rows, sum.data());
      for (size_t i = 0; i < cols; ++i) {
        double expected = -1.0;
        for (size_t r = 0; r < rows; ++r) {
          expected += static_cast<double>(matrix[r * cols + i]) * factors[r];
        }
        EXPECT_NEAR(sum[i], expected, 1e-5) << rows << " x " << cols;
      }
    }
  }
}

TEST(VectorMath, GeluMultiplyAlsoAtTheEnds) {
  std::mt19937 random(9);
  for (size_t n = 1; n <= kLongest; ++n) {
    std::vector<float> gate = normal_values(n, 3.0F, random);
    gate[0] = n % 2 == 0 ? -1e20F : 1e20F;
    const std::vector<float> up = normal_values(n, 1.0F, random);
    std::vector<float> out = gate;
    gelu_multiply(out.data(), up.data(), n, out.data());
    for (size_t i = 0; i < n; ++i) {
      const double x = gate[i];
      const double inner = std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      const double expected = 0.5 * x * (1.0 + std::tanh(inner)) * up[i];
      EXPECT_NEAR(out[i], expected, 1e-5 * std::abs(expected) + 1e-5) << "gate " << gate[i];
    }
  }
}

TEST(VectorMath, SoftCapAlsoFarOutside) {
  std::mt19937 random(10);
  for (size_t n = 1; n <= kLongest; ++n) {
    std::vector<float> x = normal_values(n, 60.0F, random);
    x[0] = n % 2 == 0 ? -1e30F : 1e30F;
    std::vector<float> capped = x;
    soft_cap(30.0F, n, capped.data());
    for (size_t i = 0; i < n; ++i) {
      EXPECT_NEAR(capped[i], 30.0 * std::tanh(x[i] / 30.0), 4e-7 * 30.0) << x[i];
    }
  }
}

TEST(VectorMath, SiluMultiplyAlsoAtTheEnds) {
  std::mt19937 random(3);
  for (size_t n = 1; n <= kLongest; ++n) {
    std::vector<float> gate = normal_values(n, 20.0F, random);
    gate[0] = n % 2 == 0 ? -1e30F : 1e30F;
    const std::vector<float> up = normal_values(n, 1.0F, random);
    std::vector<float> out = gate;
    silu_multiply(out.data(), up.data(), n, out.data());
    for (size_t i = 0; i < n; ++i) {
      const double expected = gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i];
      EXPECT_NEAR(out[i], expected, 1e-5 * std::abs(expected) + 1e-6) << "gate " << gate[i];
    }
  }
}

TEST(VectorMath, ExpWithinItsPromise) {
  std::vector<float> x;
  for (float value = -87.0F; value <= 87.0F; value += 0.0137F) x.push_back(value);
  std::vector<float> y = x;
  exp_in_place(y.data(), y.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    EXPECT_NEAR(y[i] / expected, 1.0, 3e-7 + 1e-7 * std::abs(x[i])) << x[i];
  }
  std::vector<float> ends = {-1e30F, 1e30F, 0.0F};
  exp_in_place(ends.data(), ends.size());
  EXPECT_LT(ends[0], 1e-37F);
  EXPECT_GT(ends[1], 1e37F);
  EXPECT_EQ(ends[2], 1.0F);
}

TEST(VectorMath, OnlineSoftmaxOverBlocksIsOneSoftmax) {
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    const auto blocks = std::uniform_int_distribution<size_t>(1, 4)(random);
    const float spread = round % 2 == 0 ? 3.0F : 100.0F;
    float running_max = -std::numeric_limits<float>::infinity();
    float running_sum = 0.0F;
    std::vector<double> logits;
    std::vector<double> weights;  // of all blocks so far, shrunk as the caller would
    for (size_t block = 0; block < blocks; ++block) {
      const auto n = std::uniform_int_distribution<size_t>(1, kLongest)(random);
      const auto valid = std::uniform_int_distribution<size_t>(1, n)(random);
      std::vector<float> scores = normal_values(n, spread, random);
      logits.insert(logits.end(), scores.begin(), scores.begin() + static_cast<ptrdiff_t>(valid));
      const float shrink = online_softmax_row(scores.data(), valid, n, running_max, running_sum);
      for (double& weight : weights) weight *= shrink;
      weights.insert(weights.end(), scores.begin(), scores.begin() + static_cast<ptrdiff_t>(valid));
      for (size_t i = valid; i < n; ++i) EXPECT_EQ(scores[i], 0.0F);
    }
    const double best = *std::max_element(logits.begin(), logits.end());
    EXPECT_EQ(running_max, static_cast<float>(best));
    double sum = 0.0;
    for (const double logit : logits) sum += std::exp2(logit - best);
    EXPECT_NEAR(running_sum / sum, 1.0, 2e-6) << "round " << round;
    for (size_t i = 0; i < logits.size(); ++i) {
      EXPECT_NEAR(weights[i], std::exp2(logits[i] - best), 2e-6) << "round " << round;
    }
  }
}

TEST(VectorMath, AddAndScale) {
  std::mt19937 random(5);
  for (size_t n = 1; n <= kLongest; ++n) {
    const std::vector<float> x = normal_values(n, 1.0F, random);
    const std::vector<float> before = normal_values(n, 1.0F, random);
    std::vector<float> y = before;
    add(x.data(), n, y.data());
    scale(0.5F, n, y.data());
    for (size_t i = 0; i < n; ++i) EXPECT_FLOAT_EQ(y[i], (before[i] + x[i]) * 0.5F);
  }
}

}  // namespace
}  // namespace keyhole::tools
