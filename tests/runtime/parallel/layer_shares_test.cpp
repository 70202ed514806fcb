#include "runtime/parallel/layer_shares.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::runtime {
namespace {

class LayerSharesTest : public test::LayerConfig {};

TEST_F(LayerSharesTest, SlidingLayersAreWholeOnEveryRank) {
  own_layers();
  layers_[1].window = 32;
  const Engine engine(engine_config_);
  const TextBlocks blocks{.block = 10, .ranks = 3};
  uint32_t in_all = 0;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const LayerShares shares(engine, blocks, rank);
    EXPECT_FALSE(shares.is_whole(0));
    EXPECT_TRUE(shares.is_whole(1));
    EXPECT_EQ(shares.of(1, 47), 47U);
    in_all += shares.of(0, 47);
    EXPECT_EQ(shares.is_own(10), rank == 1);
    std::vector<uint32_t> tokens(engine.model().layers, 47);
    tokens = shares.of(tokens);
    EXPECT_EQ(tokens[0], shares.of(0, 47));
    EXPECT_EQ(tokens[1], 47U);
  }
  EXPECT_EQ(in_all, 47U);
}

TEST_F(LayerSharesTest, WithoutRanksAllIsOwn) {
  const Engine engine(engine_config_);
  const LayerShares shares(engine);
  EXPECT_EQ(shares.rank(), 0U);
  EXPECT_EQ(shares.of(0, 1000), 1000U);
  EXPECT_TRUE(shares.is_own(999));
}

}  // namespace
}  // namespace keyhole::runtime
