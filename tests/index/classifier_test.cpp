#include "tests/index/classifiers.h"

namespace keyhole::index::test {
namespace {

TEST(QueryClassifier, EqualsDoublePrecision) {
  for (uint32_t seed = 0; seed < cases(24); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const uint32_t hidden = 64 * (1 + random() % 10);
    const size_t count = 1 + random() % 90;
    const uint32_t group = keyhole::test::some_group(random());
    const ClassifierWeights weights = random_weights(dim, hidden, count, random);
    std::vector<float> log_sizes(count);
    for (float& s : log_sizes) {
      s = random() % 4 == 0 ? kMinusInf : std::log(static_cast<float>(1 + random() % 500));
    }
    log_sizes[random() % count] = 1.5F;
    const auto queries = gaussian(group, dim, random);
    for (const cpu::Level level : cpu::available_levels()) {
      const QueryClassifier classifier(*cpu::kernels_for(level), weights);
      QueryClassifier::Scratch scratch;
      scratch.reserve(kMaxGroup, count);
      std::vector<float> density(count);
      classifier.densities(queries.data(), group, log_sizes.data(), scratch, density.data());
      const auto expected = densities(weights, queries, log_sizes);
      for (size_t c = 0; c < count; ++c) {
        if (log_sizes[c] == kMinusInf) continue;  // unspecified
        ASSERT_NEAR(density[c], expected[c], 2e-3 * expected[c] + 1e-9) << c;
      }
    }
  }
}

TEST(QueryClassifier, QueriesOutOfBoundsGiveNoPreference) {
  std::mt19937 random(31);
  const QueryClassifier classifier(*context().kernels, random_weights(64, 64, 20, random));
  QueryClassifier::Scratch scratch;
  scratch.reserve(1, 20);
  std::vector<float> density(20, -1.0F);
  const std::vector<float> sizes(20, 0.0F);
  for (const float x : {3e38F, -3e38F, 1e30F}) {
    const std::vector<float> query(64, x);
    classifier.densities(query.data(), 1, sizes.data(), scratch, density.data());
    for (const float d : density) EXPECT_TRUE(std::isfinite(d) && d >= 0.0F);
  }
}

TEST(QueryClassifier, RefusesWhatDoesNotFit) {
  std::mt19937 random(32);
  const ClassifierWeights good = random_weights(64, 128, 10, random);
  const auto refused = [&](auto&& damage) {
    ClassifierWeights bad = good;
    damage(bad);
    try {
      const QueryClassifier made(*context().kernels, bad);
    } catch (const Error& e) {
      return e.status() == Status::corrupt;
    }
    return false;
  };
  EXPECT_NO_THROW(QueryClassifier(*context().kernels, good));
  EXPECT_TRUE(refused([](auto& w) { w.dim = 63; }));
  EXPECT_TRUE(refused([](auto& w) { w.dim = 128; }));
  EXPECT_TRUE(refused([](auto& w) { w.hidden = 100; }));
  EXPECT_TRUE(refused([](auto& w) { w.hidden = 0; }));
  EXPECT_TRUE(refused([](auto& w) { w.hidden = 192; }));
  EXPECT_TRUE(refused([](auto& w) { w.partitions = {}; }));
  EXPECT_TRUE(refused([](auto& w) { w.partitions.centroids.pop_back(); }));
  EXPECT_TRUE(refused([](auto& w) { w.w1.pop_back(); }));
  EXPECT_TRUE(refused([](auto& w) { w.w2.push_back(0); }));
  EXPECT_TRUE(refused([](auto& w) { w.w3.clear(); }));
  EXPECT_TRUE(refused([](auto& w) { w.b1[5] = NAN; }));
  EXPECT_TRUE(refused([](auto& w) { w.b2[5] = INFINITY; }));
  EXPECT_TRUE(refused([](auto& w) { w.partitions.bonuses[1] = NAN; }));
  EXPECT_TRUE(refused([](auto& w) { w.w2[7] = 0x7C00; }));
}

TEST(QueryClassifier, DigestTellsWeightsApart) {
  std::mt19937 random(33);
  const ClassifierWeights a = random_weights(64, 64, 10, random);
  ClassifierWeights b = a;
  const QueryClassifier one(*context().kernels, a);
  EXPECT_EQ(one.digest(), QueryClassifier(*context().kernels, b).digest());
  b.w2[3] ^= 1;
  EXPECT_NE(one.digest(), QueryClassifier(*context().kernels, b).digest());
}

}  // namespace
}  // namespace keyhole::index::test
