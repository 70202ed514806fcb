// The rivals that are libraries: with parameters that leave nothing out they find the best keys.
#include <gtest/gtest.h>

#include "tests/tools/rivals/rival_case.h"

namespace keyhole::tools {
namespace {

constexpr size_t kWanted = 10;

// Share of the best keys of each query that the search finds; -1 where this build lacks the rival.
double recall(const RivalCase& on, const std::string& text, RivalAnswer& answer) {
  const auto rival = build_rival(on, text);
  if (rival == nullptr) return -1;
  EXPECT_GT(rival->bytes(), 0U);
  size_t hits = 0;
  const size_t steps = on.queries.size() / on.shape.dim / on.shape.group;
  for (size_t i = 0; i < steps; ++i) {
    answer.reset(on.shape.group);
    rival->search(on.query(i * on.shape.group), on.shape.group, kWanted, answer);
    for (size_t j = 0; j < on.shape.group; ++j) {
      const std::set<uint32_t> best = on.best(i * on.shape.group + j, kWanted);
      const std::vector<uint32_t>& rows = answer.heads[j].rows;
      EXPECT_LE(rows.size(), kWanted);
      EXPECT_EQ(std::set<uint32_t>(rows.begin(), rows.end()).size(), rows.size());
      for (const uint32_t row : rows) hits += best.count(row);
    }
  }
  return static_cast<double>(hits) / static_cast<double>(steps * on.shape.group * kWanted);
}

TEST(LibraryRivals, FindTheBestKeysWithAllListsOrWideBeams) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const RivalCase on(random, 500, 16, 2, 5);
  size_t there = 0;
  for (const char* text : {"faiss-ivf:lists=9,probe=9", "faiss-ivfpq:lists=9,probe=9,m=4,refine=50",
                           "faiss-hnsw:ef=500", "hnswlib:ef=500"}) {
    SCOPED_TRACE(text);
    RivalAnswer answer;
    const double found = recall(on, text, answer);
    if (found < 0) continue;
    ++there;
    // Lists leave nothing out; products of equal size may come in another order. A graph may have lost a key.
    EXPECT_GE(found, std::string(text).find("ivf") != std::string::npos ? 0.99 : 0.95);
    EXPECT_GE(answer.keys_scored, 2U * 490);
    EXPECT_LE(answer.keys_scored, 2U * 500 + 2 * 64);
    EXPECT_FALSE(answer.own_rows);
  }
  if (there == 0) GTEST_SKIP() << "neither Faiss nor hnswlib is installed";
}

TEST(LibraryRivals, GraphsOfRawProductsAreSearchedToo) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const RivalCase on(random, 500, 16, 2, 5);
  size_t there = 0;
  for (const char* text : {"faiss-hnsw:lift=0,ef=500", "hnswlib:lift=0,ef=500"}) {
    SCOPED_TRACE(text);
    RivalAnswer answer;
    const double found = recall(on, text, answer);
    if (found < 0) continue;
    ++there;
    EXPECT_GT(found, 0.3);  // the longest keys are what remains within reach, and they score well
    RivalAnswer lifted;
    (void)recall(on, std::string(text).replace(std::string(text).find("lift=0"), 6, "lift=1"),
                 lifted);
    EXPECT_LT(answer.keys_scored, lifted.keys_scored + 64);
  }
  if (there == 0) GTEST_SKIP() << "neither Faiss nor hnswlib is installed";
}

TEST(LibraryRivals, ReadLessWithLess) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const RivalCase on(random, 500, 16, 2, 5);
  const char* const pairs[][2] = {
      {"faiss-ivf:lists=20,probe=1", "faiss-ivf:lists=20,probe=20"},
      {"faiss-ivfpq:lists=20,probe=1,refine=1", "faiss-ivfpq:lists=20,probe=20,refine=20"},
      {"faiss-hnsw:m=4,ef=10", "faiss-hnsw:m=4,ef=400"},
      {"hnswlib:m=4,ef=10", "hnswlib:m=4,ef=400"}};
  size_t there = 0;
  for (const auto& [little, much] : pairs) {
    SCOPED_TRACE(little);
    RivalAnswer few;
    RivalAnswer many;
    const double worse = recall(on, little, few);
    const double better = recall(on, much, many);
    if (better < 0) continue;
    ++there;
    EXPECT_LT(few.keys_scored, many.keys_scored / 2);
    EXPECT_LT(few.bytes_read, many.bytes_read);
    EXPECT_LT(worse, better);
  }
  if (there == 0) GTEST_SKIP() << "neither Faiss nor hnswlib is installed";
}

}  // namespace
}  // namespace keyhole::tools
