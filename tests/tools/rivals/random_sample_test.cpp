// random: uniform, without replacement, and unbiased by its weights.
#include <gtest/gtest.h>

#include "tests/sanitized.h"
#include "tests/tools/rivals/rival_case.h"

namespace keyhole::tools {
namespace {

TEST(RandomSample, EveryKeyIsAsLikelyAndWeighsForTheOthers) {
  std::mt19937 random(3);
  RivalCase on(random, 50, 8, 2, 1);
  on.rule.scale = 0.1F;
  const auto rival = build_rival(on, "random:budget=20,seed=9");
  RivalStep step(*rival, on.stored, on.shape, on.rule, 1);
  const size_t runs = test::unless_sanitized(4000, 1000);
  std::vector<size_t> drawn(50);
  double sum = 0;
  double squares = 0;
  for (size_t i = 0; i < runs; ++i) {
    step.run(on.query(0));
    ASSERT_EQ(step.distinct.size(), 20U);  // each once
    for (const uint32_t row : step.distinct) ++drawn[row];
    const double estimate = std::exp(double{step.lse[0]});
    sum += estimate;
    squares += estimate * estimate;
  }
  const auto n = static_cast<double>(runs);
  const double mean = sum / n;
  EXPECT_NEAR(mean, on.sums(0).weights, 5 * std::sqrt((squares / n - mean * mean) / n));
  // Binomial with p = 0.4.
  for (const size_t times : drawn) EXPECT_NEAR(times, 0.4 * n, 5 * std::sqrt(0.24 * n));
}

}  // namespace
}  // namespace keyhole::tools
