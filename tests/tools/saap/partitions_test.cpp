#include "tools/saap/partitions.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/tools/saap/gaussian.h"

namespace keyhole::tools {
namespace {

TEST(Partitions, PointsGoToTheLargestScore) {
  std::mt19937 random(1);
  const Partitions p = {24, gaussian(17 * 24, 1.0F, random), gaussian(17, 1.0F, random)};
  const auto points = gaussian(700 * 24, 1.0F, random);
  const auto labels = partition_of(p, points.data(), 700);
  for (size_t i = 0; i < 700; ++i) {
    const auto score = [&](size_t c) {
      double sum = p.offsets[c];
      for (size_t j = 0; j < 24; ++j) sum += double{points[i * 24 + j]} * p.centroids[c * 24 + j];
      return sum;
    };
    for (size_t c = 0; c < 17; ++c) ASSERT_LE(score(c), score(labels[i]) + 1e-4);
  }
}

// Well separated directions around a far common mean: only with the mean taken out can they be told apart
// by angle.
TEST(Partitions, FindClustersWhateverTheirCommonMean) {
  std::mt19937 random(2);
  constexpr size_t kDim = 32;
  const auto centres = gaussian(8 * kDim, 1.0F, random);
  const auto mean = gaussian(kDim, 1.0F, random);
  auto points = gaussian(800 * kDim, 1.0F, random);
  for (size_t i = 0; i < 800; ++i) {
    for (size_t j = 0; j < kDim; ++j) {
      float& x = points[i * kDim + j];
      x = 100 * mean[j] + 5 * centres[i % 8 * kDim + j] + 0.1F * x;
    }
  }
  // More partitions than clusters, so that a poor start cannot merge two.
  const Partitions p = train_partitions(points.data(), 800, kDim, {.partitions = 120});
  const auto labels = partition_of(p, points.data(), 800);
  for (size_t a = 0; a < 64; ++a) {
    for (size_t b = 0; b < 64; ++b) EXPECT_TRUE(a % 8 == b % 8 || labels[a] != labels[b]);
  }
  for (size_t c = 0; c < p.count(); ++c) {
    double squares = 0;
    for (size_t j = 0; j < kDim; ++j) squares += std::pow(p.centroids[c * kDim + j], 2);
    EXPECT_NEAR(squares, 1, 1e-4);
  }
}

TEST(Partitions, OddPoints) {
  const std::vector<float> same(50 * 8, 2.0F);
  const Partitions p = train_partitions(same.data(), 50, 8, {.partitions = 10, .iterations = 3});
  for (const float x : p.centroids) EXPECT_TRUE(std::isfinite(x));
  EXPECT_EQ(partition_of(p, same.data(), 50).size(), 50U);
  EXPECT_EQ(train_partitions(same.data(), 3, 8, {.partitions = 10}).count(), 3U);
}

}  // namespace
}  // namespace keyhole::tools
