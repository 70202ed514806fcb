// Graphs of keys most of which are nearly alike: the few others are found, after appends, truncation, copies and
// files; and ordinary keys have no lone rows.
#include "index/graph/lone_rows.h"

#include <numeric>
#include <random>
#include <sstream>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kNearDim = 64;

/// A share of the keys lies about a few keys, `noise` of their length away; the others are needles.
struct Crowd {
  Crowd(size_t n, double share, size_t crowds, float noise, uint32_t seed)
      : random(seed), keys(n, kNearDim, DType::f16) {
    values = gaussian(n, kNearDim, random);
    const std::vector<float> centers = gaussian(crowds, kNearDim, random);
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    const auto alike = static_cast<size_t>(share * static_cast<double>(n));
    for (size_t i = 0; i < alike; ++i) {
      float* key = values.data() + size_t{order[i]} * kNearDim;
      const float* center = centers.data() + i % crowds * kNearDim;
      for (uint32_t j = 0; j < kNearDim; ++j) key[j] = center[j] + noise * key[j];
    }
    needles.assign(order.begin() + static_cast<std::ptrdiff_t>(alike), order.end());
    std::sort(needles.begin(), needles.end());
    keys.put(0, values);
    for (size_t i = 0; i < 500; ++i) {
      const std::vector<float> q = query(static_cast<uint32_t>(random() % n), 1.0F, 0.3F);
      training.insert(training.end(), q.begin(), q.end());
    }
  }
  std::vector<float> query(uint32_t row, float length, float noise) {
    std::vector<float> q = gaussian(1, kNearDim, random);
    for (uint32_t j = 0; j < kNearDim; ++j) {
      q[j] = noise * q[j] + length * values[size_t{row} * kNearDim + j];
    }
    return q;
  }
  [[nodiscard]] std::unique_ptr<Index> build(const std::string& spec, size_t count) const {
    auto index = make_index(spec, kNearDim, keys.dtype(), context());
    BuildInput input;
    input.keys = keys.view(count);
    input.queries.rows =
        dense_rows(training.data(), training.size() / kNearDim, kNearDim, DType::f32);
    index->build(input, {});
    return index;
  }
  /// The share of the needles, of at most 100 of them, that searches find.
  double found(const Index& index) {
    std::vector<uint32_t> wanted;
    for (const uint32_t row : needles) {
      if (row < index.count()) wanted.push_back(row);
    }
    const size_t step = std::max<size_t>(wanted.size() / 100, 1);
    size_t asked = 0, hits = 0;
    const auto scratch = index.make_scratch(1, 10);
    for (size_t i = 0; i < wanted.size(); i += step) {
      const std::vector<uint32_t> ids =
          search(index, query(wanted[i], 3.0F, 0.1F), kNearDim, 10, *scratch).heads[0].ids;
      ++asked;
      hits += std::find(ids.begin(), ids.end(), wanted[i]) != ids.end() ? 1 : 0;
    }
    return static_cast<double>(hits) / static_cast<double>(asked);
  }

  std::mt19937 random;
  Keys keys;
  std::vector<float> values, training;
  std::vector<uint32_t> needles;  // rising
};

constexpr size_t kCrowdRows = unless_sanitized(6000, 1300);

class LoneRowGraphs : public ::testing::TestWithParam<const char*> {};

TEST_P(LoneRowGraphs, NeedlesAmongNearlyEqualKeysAreFound) {
  struct Case {
    double share;
    size_t crowds;
    float noise;
  };
  const std::vector<Case> all = {{0.98, 1, 0.01F},  {0.98, 1, 0.2F},   {0.98, 7, 0.01F},
                                 {0.98, 1, 0.001F}, {0.98, 40, 0.01F}, {0.9, 1, 0.05F}};
  for (const Case& c : unless_sanitized(all, 2)) {
    SCOPED_TRACE(std::to_string(c.share) + " of " + std::to_string(c.crowds) + ", noise " +
                 std::to_string(c.noise) + ", seed 51");
    Crowd crowd(kCrowdRows, c.share, c.crowds, c.noise, 51);
    const auto index = crowd.build(GetParam(), kCrowdRows);
    EXPECT_GE(crowd.found(*index), 0.95);
    EXPECT_EQ(diagnostic(*index, "lone_rows"), static_cast<double>(crowd.needles.size()));
  }
}

TEST_P(LoneRowGraphs, AppendsTruncationsCopiesAndFilesKeepThem) {
  Crowd crowd(kCrowdRows, 0.98, 2, 0.02F, 52);
  const auto index = crowd.build(GetParam(), kCrowdRows / 2);
  for (size_t n = kCrowdRows / 2; n < kCrowdRows;) {
    n = std::min(n + kCrowdRows / 8, kCrowdRows);
    index->append(crowd.keys.view(n), {});
    EXPECT_GE(crowd.found(*index), 0.95) << n;
  }
  const double all = static_cast<double>(crowd.needles.size());
  EXPECT_EQ(diagnostic(*index, "lone_rows"), all);
  std::stringstream bytes;
  index->save(bytes);
  const auto loaded = make_index(GetParam(), kNearDim, DType::f16, context());
  loaded->load(bytes, crowd.keys.view());
  EXPECT_EQ(loaded->info().diagnostics, index->info().diagnostics);
  const Keys other = crowd.keys;
  const auto copy = index->share(other.view());
  // They are shared, and counted once, by the first of those that hold them.
  EXPECT_EQ(index->bytes_of_others(), 0U);
  EXPECT_EQ(copy->bytes_of_others(), copy->bytes());
  EXPECT_GE(copy->bytes(), (crowd.needles.size() + 2) * sizeof(uint32_t));
  for (int i = 0; i < 20; ++i) {
    const std::vector<float> q = gaussian(3, kNearDim, crowd.random);
    const auto heads = search(*index, q, kNearDim, 10).heads;
    EXPECT_EQ(search(*loaded, q, kNearDim, 10).heads, heads);
    EXPECT_EQ(search(*copy, q, kNearDim, 10).heads, heads);
  }
  // Below the next power of 2, with nothing behind that could be read.
  const size_t cut = kCrowdRows / 2 - 10;
  crowd.keys.poison(cut);
  index->truncate(cut);
  EXPECT_GE(crowd.found(*index), 0.95);
  EXPECT_LT(diagnostic(*index, "lone_rows"), all);
  index->truncate(1);
  EXPECT_EQ(diagnostic(*index, "lone_rows"), 0.0);
  crowd.keys.put(0, crowd.values);
  index->append(crowd.keys.view(), {});
  EXPECT_GE(crowd.found(*index), 0.95);
}

TEST_P(LoneRowGraphs, OrdinaryKeysHaveNone) {
  Crowd crowd(1500, 0.0, 1, 0.0F, 53);
  const auto index = crowd.build(GetParam(), 1500);
  EXPECT_EQ(diagnostic(*index, "lone_rows"), 0.0);
}

INSTANTIATE_TEST_SUITE_P(Types, LoneRowGraphs,
                         ::testing::Values("hnsw", "roargraph", "roargraph:codec=none"));

// What is found depends on the keys and their number alone, and of many some are starts.
TEST(LoneRows, AreTheSameHoweverTheyCame) {
  Crowd crowd(5000, 0.8, 3, 0.01F, 54);
  const auto at = [&](size_t n) { return crowd.keys.view(n); };
  const Lift lift = Lift::of(*context().kernels, at(1000), {}, 1.0);
  const auto lifted = [&](size_t n) { return LiftedKeys(*context().kernels, at(n), lift, {}); };
  const Twins none;
  LoneRows grown;
  for (const size_t n : {600, 601, 1500, 2500, 4096, 4999, 5000, 4200, 3000, 5000}) {
    grown = grown.of(lifted(n), none);
    const LoneRows once = LoneRows::among(lifted(n), none);
    ASSERT_TRUE(std::equal(once.rows().begin(), once.rows().end(), grown.rows().begin(),
                           grown.rows().end()))
        << n;
    ASSERT_TRUE(std::equal(once.starts().begin(), once.starts().end(), grown.starts().begin(),
                           grown.starts().end()))
        << n;
  }
  EXPECT_EQ(std::vector<uint32_t>(grown.rows().begin(), grown.rows().end()), crowd.needles);
  EXPECT_EQ(grown.starts().size(), 256U);
  EXPECT_TRUE(std::includes(grown.rows().begin(), grown.rows().end(), grown.starts().begin(),
                            grown.starts().end()));
  EXPECT_TRUE(LoneRows::among(lifted(100), none).rows().empty());
}

}  // namespace
}  // namespace keyhole::index::test
