// Divergences beside cases worked out by hand, and beside sums in long double.
#include "tools/commands/eval/divergence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace keyhole::tools {
namespace {

TEST(Divergence, IsThatOfTheTwoDistributions) {
  // p = 1/2, 1/2; q = 1/4, 3/4: ln 2 - ln(3) / 2.
  const std::vector<float> p = {5.0F, 5.0F}, q = {0.0F, std::log(3.0F)};
  EXPECT_NEAR(divergence(p, q), std::log(2.0) - std::log(3.0) / 2, 1e-7);
  // The other way round it is another number.
  EXPECT_NEAR(divergence(q, p), 0.25 * std::log(0.5) + 0.75 * std::log(1.5), 1e-7);
  EXPECT_EQ(divergence(p, p), 0.0);
  // A constant in the logits changes no distribution.
  const std::vector<float> shifted = {-995.0F, -995.0F};
  EXPECT_NEAR(divergence(p, shifted), 0.0, 1e-12);
  // What p never says costs nothing, however sure q is of it; what q never says costs its logit.
  const std::vector<float> sure = {800.0F, 0.0F}, unsure = {0.0F, 800.0F};
  EXPECT_NEAR(divergence(sure, unsure), 800.0, 1e-9);
}

TEST(Divergence, OfLogProbabilitiesLeavesOutTheLeast) {
  // p = 1/2, 1/4, 1/4 in nats, and q = 1/4, 1/4, 1/2.
  const float half = std::log(0.5F), quarter = std::log(0.25F);
  const std::vector<float> p = {half, quarter, quarter}, q = {1.0F, 1.0F, 1.0F + std::log(2.0F)};
  const double log_sum = 1.0 + std::log(4.0);
  const auto above = [&](float least) {
    return divergence_from_log_probabilities(p, least, q, log_sum);
  };
  EXPECT_NEAR(above(-16.0F), 0.5 * std::log(2.0) - 0.25 * std::log(2.0), 1e-6);
  EXPECT_NEAR(above(-1.0F), 0.5 * std::log(2.0), 1e-6);
  EXPECT_EQ(above(quarter), above(-1.0F));  // the least itself does not count
  EXPECT_EQ(above(half), 0.0);
  // What is left out may leave less than nothing.
  const std::vector<float> sure = {1.0F + std::log(2.0F), 1.0F, 1.0F - 100.0F};
  EXPECT_LT(divergence_from_log_probabilities(p, -1.0F, sure, 1.0 + std::log(3.0)), 0.0);
}

TEST(Divergence, OfManyTokensIsTheSumInLongDouble) {
  std::mt19937 random(3);
  std::normal_distribution<float> wide(0.0F, 4.0F), narrow(0.0F, 1.0F);
  for (const float noise : {1e-4F, 1e-2F, 1.0F}) {
    std::vector<float> p(50000), q(p.size());
    for (size_t i = 0; i < p.size(); ++i) {
      p[i] = wide(random);
      q[i] = p[i] + noise * narrow(random);
    }
    const auto log_sum = [](const std::vector<float>& logits) {
      long double sum = 0.0L;
      for (const float x : logits) sum += std::exp(static_cast<long double>(x));
      return std::log(sum);
    };
    const long double sum_p = log_sum(p), sum_q = log_sum(q);
    long double truth = 0.0L;
    for (size_t i = 0; i < p.size(); ++i) {
      truth += std::exp(p[i] - sum_p) * ((p[i] - sum_p) - (q[i] - sum_q));
    }
    // Logits to fp32's precision: the difference of two of them is known to some 1e-7 of a logit.
    EXPECT_NEAR(divergence(p, q) / static_cast<double>(truth), 1.0, 1e-7 / noise + 1e-9)
        << "noise " << noise;
  }
}

TEST(Spread, HasTheQuantilesOfTheSample) {
  std::vector<double> values;
  for (int i = 1; i <= 2000; ++i) values.push_back(i);
  std::mt19937 random(4);
  std::shuffle(values.begin(), values.end(), random);
  const Spread s = spread_of(values);
  EXPECT_NEAR(s.mean, 1000.5, 1e-9);
  // The variance of 1..n is n (n + 1) / 12.
  EXPECT_NEAR(s.error, std::sqrt(2001.0 / 12), 1e-9);
  EXPECT_EQ(s.p50, 1000);
  EXPECT_EQ(s.p90, 1800);
  EXPECT_EQ(s.p99, 1980);
  EXPECT_EQ(s.p999, 1998);
  EXPECT_EQ(s.largest, 2000);
  const Spread one = spread_of({7.0});
  EXPECT_EQ(one.p50, 7.0);
  EXPECT_EQ(one.p999, 7.0);
  EXPECT_EQ(one.error, 0.0);
  // Of a few the last per mille is the largest.
  EXPECT_EQ(spread_of({1, 2, 3}).p999, 3);
}

TEST(Spread, MeansInOrderCoverAllOnce) {
  const std::vector<double> values = {1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(means_in_order(values, 1), std::vector<double>{4});
  EXPECT_EQ(means_in_order(values, 3), (std::vector<double>{1.5, 3.5, 6}));
  EXPECT_EQ(means_in_order(values, 100), values);
}

}  // namespace
}  // namespace keyhole::tools
