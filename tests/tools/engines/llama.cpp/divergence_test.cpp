#include "tools/engines/llama.cpp/divergence.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

namespace keyhole::llama_cpp {
namespace {

// p = 1/4, 3/4 and q = 1/2, 1/2, at logits that any constant may be added to.
TEST(Divergence, IsThatOfTwoDistributions) {
  const std::array<float, 2> p{std::log(1.0F) + 7, std::log(3.0F) + 7};
  const std::array<float, 2> q{-90, -90};
  const Divergence result = divergence(p.data(), q.data(), 2);
  EXPECT_NEAR(result.nats, 0.25 * std::log(0.5) + 0.75 * std::log(1.5), 1e-6);
  EXPECT_FALSE(result.same_best);
  EXPECT_NEAR(divergence(p.data(), p.data(), 2).nats, 0, 1e-12);
  EXPECT_TRUE(divergence(p.data(), p.data(), 2).same_best);
}

TEST(Divergence, IsInfiniteWhereAnAnswerIsNullOrNotFinite) {
  const std::array<float, 3> good{1, 2, 3};
  EXPECT_EQ(divergence(good.data(), nullptr, 3).nats, INFINITY);
  EXPECT_EQ(divergence(nullptr, good.data(), 3).nats, INFINITY);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY}) {
    for (size_t at = 0; at < 3; ++at) {
      std::array<float, 3> answer = good;
      answer[at] = bad;
      const Divergence result = divergence(good.data(), answer.data(), 3);
      EXPECT_EQ(result.nats, INFINITY) << bad << " at " << at;
      EXPECT_FALSE(result.same_best);
    }
  }
}

}  // namespace
}  // namespace keyhole::llama_cpp
