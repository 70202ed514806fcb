// explore(): every key that a search scored, with its scores for all heads; and the two halves of append().
#include <thread>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr const char* kExploreSpecs[] = {"flat",
                                         "ivf:C=20,probe=5,segment=200,iters=2",
                                         "hnsw:M=8,ef=30,efc=40",
                                         "flat:codec=int8",
                                         "roargraph:M=8,ef=8,beam=40",
                                         "roargraph:M=8,ef=8,beam=40,codec=none",
                                         "saap:C=20,probe=5,iters=2",
                                         "sparq:r=8",
                                         "sparq:r=8,local=3,codec=int8",
                                         "codes:k=4"};

class Explore : public ::testing::TestWithParam<const char*> {};

TEST_P(Explore, HoldsWhatTheSearchFindsWithScoresForAllHeads) {
  for (uint32_t seed = 0; seed < cases(8); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const DType dtype = key_dtypes()[seed % 3];
    const uint32_t group = 1 + random() % 5;
    Keys keys(random() % 900, 64, dtype);
    keys.put(0, attention_keys(keys.count(), 64, random));
    const auto index = built(GetParam(), keys);
    const auto queries = attention_queries(group, 64, keys, random);
    const auto scratch = index->make_scratch(group, 10);
    const Answer best = search(*index, queries, 64, 10, *scratch);
    Scored scored;
    index->explore({.queries = queries.data(), .group = group, .k = 10}, *scratch, scored);

    std::vector<uint32_t> rows(scored.rows.begin(), scored.rows.end());
    std::sort(rows.begin(), rows.end());
    EXPECT_EQ(std::adjacent_find(rows.begin(), rows.end()), rows.end()) << "a row came twice";
    for (uint32_t h = 0; h < group; ++h) {
      for (const uint32_t id : best.heads[h].ids) {
        EXPECT_TRUE(std::binary_search(rows.begin(), rows.end(), id)) << "row " << id;
      }
      for (size_t i = 0; scored.exact && i < scored.rows.size(); ++i) {
        const float* query = queries.data() + size_t{h} * 64;
        EXPECT_NEAR(scored.scores[h * scored.stride + i], keys.score(scored.rows[i], query), 1e-3);
      }
    }
    EXPECT_GE(scored.keys_scored, scored.rows.size());
    EXPECT_EQ(scored.keys_scored, best.keys_scored);
  }
}

TEST_P(Explore, PreparedAppendIsTheAppend) {
  std::mt19937 random(5);
  Keys keys(600, 64, DType::f16);
  keys.put(0, attention_keys(600, 64, random));
  const auto queries = attention_queries(2, 64, keys, random);
  RowsView some = keys.view();
  some.tokens = 400;
  const auto make = [&] {
    auto index = make_index(GetParam(), 64, DType::f16, context());
    BuildInput input;
    input.keys = some;
    index->build(input, {});
    return index;
  };
  const auto one = make();
  const auto two = make();
  one->append(keys.view(), {});

  // Searches run while the append is worked out, and see nothing of it.
  const Answer before = search(*two, queries, 64, 10);
  std::unique_ptr<Addition> addition;
  std::thread builder([&] { addition = two->prepare_append(keys.view(), {}); });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(search(*two, queries, 64, 10).heads, before.heads);
  builder.join();
  EXPECT_EQ(search(*two, queries, 64, 10).heads, before.heads);
  EXPECT_EQ(two->count(), 400U);
  two->commit_append(std::move(addition));
  EXPECT_EQ(two->count(), 600U);
  EXPECT_EQ(search(*two, queries, 64, 10).heads, search(*one, queries, 64, 10).heads);
}

TEST_P(Explore, AnAppendForAnotherStateIsRefused) {
  std::mt19937 random(6);
  Keys keys(300, 64, DType::f16);
  keys.put(0, attention_keys(300, 64, random));
  auto index = make_index(GetParam(), 64, DType::f16, context());
  BuildInput input;
  input.keys = keys.view();
  input.keys.tokens = 200;
  index->build(input, {});
  auto addition = index->prepare_append(keys.view(), {});
  index->truncate(150);
  EXPECT_THROW(index->commit_append(std::move(addition)), Error);
  EXPECT_EQ(index->count(), 150U);
  EXPECT_THROW(index->commit_append(nullptr), Error);
}

INSTANTIATE_TEST_SUITE_P(Types, Explore, ::testing::ValuesIn(kExploreSpecs));

}  // namespace
}  // namespace keyhole::index::test
