// The generator that makes tasks the same everywhere.
#include "tools/tasks/random.h"

#include <gtest/gtest.h>

#include <vector>

namespace keyhole::tools {
namespace {

TEST(Random, IsSplitMix64) {
  // The first outputs for seed 1234567 of the algorithm's authors' reference program.
  Random random(1234567);
  EXPECT_EQ(random.next(), 6457827717110365317U);
  EXPECT_EQ(random.next(), 3203168211198807973U);
  EXPECT_EQ(random.next(), 9817491932198370423U);
}

TEST(Random, BelowIsEven) {
  Random random(9);
  std::vector<int> counts(7, 0);
  constexpr int kDraws = 70000;
  for (int i = 0; i < kDraws; ++i) ++counts[random.below(7)];
  // Six standard deviations of a binomial count with mean 10000.
  for (const int count : counts) EXPECT_NEAR(count, kDraws / 7, 560);
  EXPECT_EQ(random.below(1), 0U);
  EXPECT_LT(random.below(~uint64_t{0}), ~uint64_t{0});
}

}  // namespace
}  // namespace keyhole::tools
