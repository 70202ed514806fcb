// The decisions of calibrate on made-up measurements.
#include "tools/commands/calibrate/choose.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

TEST(Requirement, ReadsItsWords) {
  const auto check = [](const char* text, double quantile, double factor) {
    const Requirement r = parse_requirement(text, 0.05);
    EXPECT_DOUBLE_EQ(r.quantile, quantile) << text;
    EXPECT_DOUBLE_EQ(r.factor, factor) << text;
    EXPECT_DOUBLE_EQ(r.limit(), 0.05 * factor) << text;
  };
  check("median", 0.5, 1);
  check("medianx2", 0.5, 2);
  check("p95", 0.95, 1);
  check("p95x1.5", 0.95, 1.5);
  check("p99.9x3", 0.999, 3);
  check("p100", 1, 1);
  for (const char* text :
       {"", "p", "p0", "p101", "95", "mean", "p95x", "p95x0", "p95x-1", "p95xinf", "p95x1.5x"}) {
    EXPECT_THROW((void)parse_requirement(text, 0.05), UsageError) << text;
  }
}

TEST(Requirement, TheRatioIsTheQuantileOverTheLimit) {
  std::vector<double> errors(100);
  for (size_t i = 0; i < 100; ++i) errors[i] = static_cast<double>(i + 1) / 1000;
  std::shuffle(errors.begin(), errors.end(), std::mt19937(1));
  EXPECT_DOUBLE_EQ(parse_requirement("p95x1.5", 0.05).ratio(errors), 0.095 / 0.075);
  EXPECT_DOUBLE_EQ(parse_requirement("median", 0.05).ratio(errors), 1.0);
  EXPECT_DOUBLE_EQ(parse_requirement("p100", 0.05).ratio(errors), 2.0);
  // The fewer steps, the more caution; never less than the plain ratio.
  const Requirement p90 = parse_requirement("p90", 0.05);
  EXPECT_DOUBLE_EQ(p90.cautious_ratio(errors, 1), 2.0);
  EXPECT_DOUBLE_EQ(p90.cautious_ratio(errors, 100), 0.093 / 0.05);
  EXPECT_DOUBLE_EQ(p90.cautious_ratio(errors, 1000000), 0.091 / 0.05);
  EXPECT_TRUE(std::isnan(quantile_of({}, 0.5)));
}

TEST(SearchTarget, FindsTheLargestThatHolds) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const double stated = std::exp(std::uniform_real_distribution(-7.0, -0.7)(random));
    const double edge =
        std::min(0.8, stated * std::exp(std::uniform_real_distribution(-2.0, 2.0)(random)));
    int calls = 0;
    const auto meets = [&](float target) {
      ++calls;
      EXPECT_GT(target, 0);
      EXPECT_LT(target, 1);
      return target <= edge;
    };
    const std::optional<float> found = search_target(stated, meets);
    ASSERT_TRUE(found) << stated << " " << edge;
    EXPECT_LE(*found, edge * 1.000001);
    // Within 15 % and the rounding, unless no larger one was to be tried.
    if (*found < stated * 8 * 0.98 && *found < 0.44) {
      EXPECT_GT(*found, edge / 1.17) << stated;
    }
    EXPECT_LE(calls, 9);
  }
}

TEST(SearchTarget, GivesUpWhereNothingHolds) {
  EXPECT_FALSE(search_target(0.05, [](float) { return false; }));
  EXPECT_TRUE(search_target(0.95, [](float) { return true; }));
}

TEST(ChooseCheapest, TakesTheCheapestThatMeetsElseTheNearest) {
  EXPECT_EQ(choose_cheapest({{0.5, 10}, {0.9, 5}, {1.1, 1}}), 1U);
  EXPECT_EQ(choose_cheapest({{1.5, 1}, {1.2, 50}, {3, 0}}), 1U);
  EXPECT_EQ(choose_cheapest({{1, 5}, {0.2, 5}, {0.3, 5}}), 1U);
  EXPECT_EQ(choose_cheapest({{1.5, 3}, {1.5, 2}}), 1U);
  EXPECT_EQ(choose_cheapest({{7, 7}}), 0U);
  EXPECT_EQ(choose_cheapest({{1.0001, 0}, {1, 100}}), 1U);
}

}  // namespace
}  // namespace keyhole::tools
