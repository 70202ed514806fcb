#include "index/scan/topk.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Rank, OrdersByScoreThenBySmallerRow) {
  const std::vector<float> rising = {-kInf,  -3e38F, -1.5F, -1e-40F, 0.0F,
                                     1e-40F, 2.0F,   3e38F, kInf};
  for (size_t i = 0; i < rising.size(); ++i) {
    EXPECT_EQ(rank_score(pack_rank(rising[i], 7)), rising[i]);
    EXPECT_EQ(rank_row(pack_rank(rising[i], 7)), 7U);
    EXPECT_GT(pack_rank(rising[i], 0), pack_rank(rising[i], 1));
    if (i == 0) continue;
    EXPECT_GT(pack_rank(rising[i], 0xFFFFFFFE), pack_rank(rising[i - 1], 0));
  }
  EXPECT_EQ(pack_rank(-0.0F, 5), pack_rank(0.0F, 5));
  EXPECT_EQ(pack_rank(std::nanf(""), 5), pack_rank(-kInf, 5));
  EXPECT_EQ(pack_rank(-std::nanf(""), 5), pack_rank(-kInf, 5));
}

TEST(SortRanks, EqualsStandardSort) {
  std::mt19937_64 random(3);
  for (const size_t n : {0, 1, 2, 100, 2047, 2048, 5000, 70000}) {
    std::vector<uint64_t> ranks(n);
    for (uint64_t& r : ranks) {
      r = pack_rank(static_cast<float>(static_cast<int>(random() % 2000) - 1000),
                    static_cast<uint32_t>(random() % 100000));
    }
    std::vector<uint64_t> expected = ranks;
    std::sort(expected.begin(), expected.end(), std::greater<>());
    std::vector<uint64_t> spare(n);
    sort_ranks(ranks.data(), spare.data(), n);
    EXPECT_EQ(ranks, expected) << n;
  }
}

TEST(SelectRanks, FindsTheBestWhateverTheOrder) {
  std::mt19937_64 random(4);
  const auto check = [&](std::vector<uint64_t> ranks, size_t k) {
    std::vector<uint64_t> expected = ranks;
    std::sort(expected.begin(), expected.end(), std::greater<>());
    expected.resize(k);
    select_ranks(ranks.data(), ranks.size(), k);
    ranks.resize(k);
    std::sort(ranks.begin(), ranks.end(), std::greater<>());
    EXPECT_EQ(ranks, expected);
  };
  for (const size_t n : {1, 2, 5, 9, 64, 1000, 20000}) {
    std::vector<uint64_t> rising(n);
    std::iota(rising.begin(), rising.end(), uint64_t{1});
    std::vector<uint64_t> falling(rising.rbegin(), rising.rend());
    std::vector<uint64_t> mixed = rising;
    std::shuffle(mixed.begin(), mixed.end(), random);
    std::vector<uint64_t> organ = rising;  // up and down again
    for (size_t i = n / 2; i < n; ++i) organ[i] = 2 * n - i;
    for (const size_t k : {size_t{1}, n / 3, n / 2, n - 1, n}) {
      if (k == 0) continue;
      for (const auto& ranks : {rising, falling, mixed, organ}) check(ranks, k);
    }
  }
}

// Random scores from a few values (ties everywhere), random k, offered in blocks of random size in random
// order, against a full sort.
TEST(TopK, EqualsAFullSortWhateverTheOrderOfOffers) {
  TopK top;  // reused: nothing of an earlier search may remain
  for (uint32_t seed = 0; seed < cases(200); ++seed) {
    std::mt19937 random(seed);
    const size_t n = 1 + random() % 3000;
    const uint32_t k = 1 + random() % (seed % 3 == 0 ? 4000 : 150);
    const uint32_t group = keyhole::test::some_group(random());
    const int distinct = 1 + static_cast<int>(random() % 500);
    std::vector<float> scores(group * n);
    for (float& s : scores) {
      s = static_cast<float>(static_cast<int>(random() % static_cast<uint32_t>(distinct)) -
                             distinct / 2);
    }
    std::vector<uint32_t> rows(n);
    std::iota(rows.begin(), rows.end(), 0U);
    const bool in_order = seed % 2 == 0;
    if (!in_order) std::shuffle(rows.begin(), rows.end(), random);

    top.begin(group, k, n);
    for (size_t first = 0; first < n;) {
      const size_t size = std::min<size_t>(1 + random() % 300, n - first);
      for (uint32_t h = 0; h < group; ++h) {
        std::vector<float> block(size);
        for (size_t i = 0; i < size; ++i) block[i] = scores[h * n + rows[first + i]];
        if (in_order) {
          top.offer(h, block.data(), static_cast<uint32_t>(first), size);
        } else {
          top.offer(h, block.data(), rows.data() + first, size);
        }
      }
      first += size;
    }
    std::vector<uint32_t> ids(size_t{group} * k);
    std::vector<float> found(size_t{group} * k);
    std::vector<uint32_t> counts(group);
    Hits hits{ids.data(), found.data(), counts.data()};
    top.finish(hits);

    for (uint32_t h = 0; h < group; ++h) {
      std::vector<uint32_t> order(n);
      std::iota(order.begin(), order.end(), 0U);
      std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        return scores[h * n + a] > scores[h * n + b];
      });
      ASSERT_EQ(counts[h], std::min<size_t>(k, n)) << "seed " << seed;
      for (uint32_t i = 0; i < counts[h]; ++i) {
        ASSERT_EQ(ids[size_t{h} * k + i], order[i]) << "seed " << seed << " head " << h;
        ASSERT_EQ(found[size_t{h} * k + i], scores[h * n + order[i]]);
      }
    }
  }
}

TEST(TopK, InfinitiesAndNaNDisplaceNoNumber) {
  std::vector<float> scores(100, 1.0F);
  for (size_t i = 0; i < 100; i += 3) scores[i] = std::nanf("");
  for (size_t i = 1; i < 100; i += 3) scores[i] = -kInf;
  scores[50] = kInf;  // row 50 = 2 mod 3
  TopK top;
  top.begin(1, 20, 100);
  top.offer(0, scores.data(), 0U, 100);
  std::vector<uint32_t> ids(20);
  std::vector<float> found(20);
  uint32_t count = 0;
  Hits hits{ids.data(), found.data(), &count};
  top.finish(hits);
  ASSERT_EQ(count, 20U);
  EXPECT_EQ(ids[0], 50U);
  for (size_t i = 1; i < 20; ++i) {
    EXPECT_EQ(found[i], 1.0F);
    EXPECT_EQ(ids[i] % 3, 2U);
  }
}

}  // namespace
}  // namespace keyhole::index::test
