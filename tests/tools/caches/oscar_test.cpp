// OSCAR's rotations, clips and rounding against definitions in double precision.
#include "tools/caches/oscar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/normal.h"
#include "tests/tools/caches/affine_reference.h"
#include "tools/caches/oscar_fit.h"
#include "tools/caches/symmetric_eigen.h"

namespace keyhole::tools {
namespace {

constexpr size_t kDim = 32;

std::vector<float> normal_numbers(std::mt19937& random, size_t count) {
  keyhole::test::Normal<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = normal(random);
  return out;
}

/// A covariance whose spectrum falls by a factor of 1.3 a channel, in directions of its own.
std::vector<double> covariance(std::mt19937& random, size_t n) {
  const std::vector<float> rows = normal_numbers(random, 4 * n * n);
  std::vector<double> c(n * n);
  for (size_t r = 0; r < 4 * n; ++r) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) {
        c[i * n + j] += double{rows[r * n + i]} * rows[r * n + j] *
                        std::pow(1.3, -static_cast<double>(i + j) / 2);
      }
    }
  }
  return c;
}

TEST(SymmetricEigen, VectorsAreOrthonormalAndInOrder) {
  std::mt19937 random(31);
  for (const size_t n : {1U, 2U, 5U, 32U}) {
    const std::vector<double> c = covariance(random, n);
    const std::vector<double> u = symmetric_eigenvectors(c, n);
    double last = INFINITY, trace = 0;
    for (size_t i = 0; i < n; ++i) trace += c[i * n + i];
    for (size_t j = 0; j < n; ++j) {
      std::vector<double> cu(n);
      double value = 0;
      for (size_t i = 0; i < n; ++i) {
        for (size_t k = 0; k < n; ++k) cu[i] += c[i * n + k] * u[k * n + j];
        value += cu[i] * u[i * n + j];
      }
      for (size_t i = 0; i < n; ++i) ASSERT_NEAR(cu[i], value * u[i * n + j], 1e-9 * trace);
      for (size_t other = 0; other < n; ++other) {
        double product = 0;
        for (size_t i = 0; i < n; ++i) product += u[i * n + j] * u[i * n + other];
        ASSERT_NEAR(product, j == other ? 1 : 0, 1e-12);
      }
      EXPECT_LE(value, last * (1 + 1e-12));
      last = value;
    }
  }
}

// H mixes eigenvectors evenly: every channel of R then has the mean variance of the covariance that it was made of.
TEST(Oscar, RotationSpreadsTheCovarianceEvenly) {
  std::mt19937 random(32);
  const std::vector<double> c = covariance(random, kDim);
  const std::vector<float> r = oscar_rotation(c, kDim);
  double trace = 0;
  for (size_t i = 0; i < kDim; ++i) trace += c[i * kDim + i];
  for (size_t j = 0; j < kDim; ++j) {
    double variance = 0;
    for (size_t a = 0; a < kDim; ++a) {
      for (size_t b = 0; b < kDim; ++b) {
        variance += c[a * kDim + b] * r[a * kDim + j] * r[b * kDim + j];
      }
    }
    EXPECT_NEAR(variance, trace / kDim, 1e-5 * trace) << "channel " << j;
    for (size_t other = 0; other <= j; ++other) {
      double product = 0;
      for (size_t a = 0; a < kDim; ++a) product += double{r[a * kDim + j]} * r[a * kDim + other];
      ASSERT_NEAR(product, j == other ? 1 : 0, 1e-5);
    }
  }
}

TEST(Oscar, RoundsTurnedAndClippedRows) {
  std::mt19937 random(33);
  const std::vector<float> rotation = oscar_rotation(covariance(random, kDim), kDim);
  for (const float quantile : {1.0F, 0.9F}) {
    std::vector<float> rows = normal_numbers(random, 20 * kDim);
    std::vector<float> through = rows;
    pass_oscar({rotation, quantile}, through.data(), 20, kDim);
    size_t compared = 0;
    for (size_t t = 0; t < 20; ++t) {
      std::vector<double> y(kDim);
      for (size_t j = 0; j < kDim; ++j) {
        for (size_t i = 0; i < kDim; ++i) {
          y[j] += double{rows[t * kDim + i]} * rotation[i * kDim + j];
        }
      }
      std::vector<double> sizes;
      for (const double x : y) sizes.push_back(std::abs(x));
      std::sort(sizes.begin(), sizes.end());
      const double most = quantile == 1 ? sizes.back() : sizes[28];  // floor(0.9 * 32)
      for (double& x : y) x = std::clamp(x, -most, most);
      const AffineReference group = affine_reference(y, 2);
      if (std::any_of(group.between.begin(), group.between.end(), [](bool b) { return b; })) {
        continue;
      }
      ++compared;
      for (size_t i = 0; i < kDim; ++i) {
        double x = 0;
        for (size_t j = 0; j < kDim; ++j) x += group.numbers[j] * rotation[i * kDim + j];
        ASSERT_NEAR(through[t * kDim + i], x, 2e-3) << "row " << t;
      }
    }
    EXPECT_GT(compared, 12U);
  }
  std::vector<float> bad(kDim, 1.0F);
  bad[3] = std::nanf("");
  pass_oscar({rotation, 0.9F}, bad.data(), 1, kDim);
  for (const float x : bad) EXPECT_TRUE(std::isnan(x));
}

// Queries that look along few directions: the fit brings the error of their logits below that of a turn that knows
// nothing.
TEST(Oscar, FitsToWhatQueriesLookAt) {
  std::mt19937 random(34);
  constexpr size_t kRows = 200, kPositions = 40, kGroup = 2;
  std::vector<float> keys = normal_numbers(random, kRows * kDim);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] *= i % kDim < 4 ? 8.0F : 1.0F;
  const std::vector<float> values = normal_numbers(random, kRows * kDim);
  std::vector<float> queries = normal_numbers(random, kPositions * kGroup * kDim);
  for (size_t i = 0; i < queries.size(); ++i) queries[i] *= i % kDim < 24 ? 0.05F : 1.0F;
  std::vector<uint32_t> positions(kPositions);
  std::iota(positions.begin(), positions.end(), uint32_t{kRows - kPositions});
  const OscarHead head = fit_oscar({.keys = keys.data(),
                                    .values = values.data(),
                                    .rows = kRows,
                                    .dim = kDim,
                                    .queries = queries.data(),
                                    .group = kGroup,
                                    .positions = positions,
                                    .scale = 0.2F});
  EXPECT_GE(head.keys.quantile, 0.9F);
  EXPECT_LE(head.values.quantile, 1.0F);
  const auto logit_error = [&](const OscarTurn& turn) {
    std::vector<float> through = keys;
    pass_oscar(turn, through.data(), kRows, kDim);
    double squares = 0;
    for (size_t q = 0; q < kPositions * kGroup; ++q) {
      for (size_t t = 0; t < kRows; ++t) {
        double error = 0;
        for (size_t c = 0; c < kDim; ++c) {
          error += double{queries[q * kDim + c]} * (through[t * kDim + c] - keys[t * kDim + c]);
        }
        squares += error * error;
      }
    }
    return squares;
  };
  std::vector<float> plain(kDim * kDim);
  for (size_t i = 0; i < kDim; ++i) plain[i * kDim + i] = 1;
  EXPECT_LT(logit_error(head.keys), 0.9 * logit_error({plain, 1.0F}));
}

TEST(Oscar, CountsBitsAndKeepsSinkAndWindow) {
  EXPECT_EQ(oscar_layout(128).bits(), 2 + 32 / 128.0);
  EXPECT_EQ(oscar_layout(256).bits(), 2.25);  // two groups a row
  EXPECT_EQ(oscar_layout(64).bits(), 2.5);
  for (const uint32_t dim : {0U, 16U, 80U, 96U}) {
    EXPECT_THROW((void)oscar_layout(dim), std::invalid_argument) << dim;
  }
  const AgingLayout layout = oscar_layout(64);
  EXPECT_EQ(layout.in_few_bits(KvRows::keys, 607), (TokenRange{64, 64}));
  EXPECT_EQ(layout.in_few_bits(KvRows::keys, 608), (TokenRange{64, 96}));
  EXPECT_EQ(layout.in_few_bits(KvRows::values, 1000), (TokenRange{64, 480}));
  EXPECT_EQ(layout.settled(1000), 480U);
}

}  // namespace
}  // namespace keyhole::tools
