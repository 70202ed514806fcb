#include "tools/page/front.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

namespace keyhole::tools {
namespace {

TEST(Front, IsWhatNoOtherPointBeats) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    // Few different values, so that many are equal.
    std::uniform_int_distribution<int> value(0, 6);
    const size_t n = 1 + random() % 12;
    std::vector<double> costs(n), losses(n);
    for (size_t i = 0; i < n; ++i) {
      costs[i] = value(random);
      losses[i] = value(random) == 6 ? std::nan("") : value(random);
    }
    const std::vector<bool> front = pareto_front(costs, losses);
    ASSERT_EQ(front.size(), n);
    for (size_t i = 0; i < n; ++i) {
      bool beaten = std::isnan(losses[i]);
      for (size_t j = 0; j < n; ++j) {
        if (std::isnan(losses[j])) continue;
        beaten = beaten || (costs[j] <= costs[i] && losses[j] <= losses[i] &&
                            (costs[j] < costs[i] || losses[j] < losses[i]));
      }
      EXPECT_EQ(front[i], !beaten) << i;
    }
  }
}

TEST(Front, OfNothingIsNothing) { EXPECT_TRUE(pareto_front({}, {}).empty()); }

}  // namespace
}  // namespace keyhole::tools
