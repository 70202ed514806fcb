// Scores of eval against cases worked out by hand.
#include "tools/commands/eval/scores.h"

#include <gtest/gtest.h>

#include <cmath>

namespace keyhole::tools {
namespace {

TEST(Scores, BitsAreThoseOfTheSoftmax) {
  const std::vector<float> even(8, 3.0F);  // 1 of 8
  EXPECT_NEAR(bits_of(even, 5), 3.0, 1e-12);
  const std::vector<float> logits = {0.0F, std::log(3.0F), std::log(4.0F)};  // 1/8, 3/8, 4/8
  EXPECT_NEAR(bits_of(logits, 0), 3.0, 1e-6);
  EXPECT_NEAR(bits_of(logits, 1), std::log2(8.0 / 3.0), 1e-6);
  EXPECT_NEAR(bits_of(logits, 2), 1.0, 1e-6);
  const std::vector<float> far = {1000.0F, 0.0F};  // exp(1000) is no double
  EXPECT_NEAR(bits_of(far, 0), 0.0, 1e-12);
  EXPECT_NEAR(bits_of(far, 1), 1000.0 / std::log(2.0), 1e-9);
}

TEST(Scores, DifferencesAreTakenPairByPair) {
  // Differences 1, 2, 3: mean 2, variance of the sample 1, so the mean's standard error is sqrt(1 / 3).
  const std::vector<double> exact = {10, 200, 3000};
  const std::vector<double> values = {11, 202, 3003};
  const Difference d = paired_difference(values, exact);
  EXPECT_NEAR(d.mean, 2.0, 1e-9);
  EXPECT_NEAR(d.error, std::sqrt(1.0 / 3.0), 1e-9);
  EXPECT_EQ(paired_difference(exact, exact).mean, 0.0);
  EXPECT_EQ(paired_difference(exact, exact).error, 0.0);
  const std::vector<double> one = {4};
  EXPECT_EQ(paired_difference(one, one).error, 0.0);
}

TEST(Scores, SwapsAreCountedBothWays) {
  const std::vector<bool> exact = {true, true, true, false, false, false, true};
  const std::vector<bool> other = {true, false, false, true, false, false, true};
  EXPECT_EQ(count_swaps(other, exact).lost, 2U);
  EXPECT_EQ(count_swaps(other, exact).won, 1U);
  EXPECT_EQ(count_swaps(exact, other).lost, 1U);
  EXPECT_EQ(count_swaps(exact, exact).lost + count_swaps(exact, exact).won, 0U);
}

}  // namespace
}  // namespace keyhole::tools
