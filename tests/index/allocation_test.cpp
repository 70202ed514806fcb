// Searches allocate nothing: every operator new of the process is counted.
#include <atomic>

#include "index/tail/tail_estimate.h"
#include "tests/index/tails.h"
#include "tests/replaced_new.h"

namespace {
std::atomic<uint64_t> allocations{0};
const keyhole::test::BeforeAllocation hook([] { ++allocations; });
}  // namespace

namespace keyhole::index::test {
namespace {

struct Arrays {
  Arrays(uint32_t group, uint32_t k) : ids(group * k), scores(group * k), counts(group) {}
  Hits hits() { return {ids.data(), scores.data(), counts.data()}; }
  std::vector<uint32_t> ids;
  std::vector<float> scores;
  std::vector<uint32_t> counts;
};

class SearchAllocation : public ::testing::TestWithParam<const char*> {};

TEST_P(SearchAllocation, NoneInASearch) {
  std::mt19937 random(81);
  Keys keys(3000, 64, DType::f16);
  keys.put(0, attention_keys(3000, 64, random));
  const auto index = make_index(GetParam(), 64, DType::f16, context());
  BuildInput input;
  input.keys = keys.view(2900);
  index->build(input, {});
  const auto queries = attention_queries(8, 64, keys, random);
  Arrays arrays(8, 3000);
  // Searches allocate nothing from the first one on, because the scratch is made for this index.
  const auto scratch = index->make_scratch(8, 3000);
  const auto count = [&](uint32_t group, uint32_t k) {
    Hits hits = arrays.hits();
    const uint64_t before = allocations;
    index->search(queries.data(), group, k, *scratch, hits);
    return allocations - before;
  };
  for (const uint32_t k : {1U, 50U, 1000U, 3000U}) {
    EXPECT_EQ(count(8, k), 0U) << k;
    EXPECT_EQ(count(3, k), 0U) << k;
  }
  // After it has grown or shrunk, at most the first search may allocate.
  index->append(keys.view(), {});
  count(8, 3000);
  count(8, 50);
  EXPECT_EQ(count(8, 50), 0U);
  EXPECT_EQ(count(8, 3000), 0U);
  index->truncate(1000);
  count(8, 50);
  EXPECT_EQ(count(8, 50), 0U);
}

INSTANTIATE_TEST_SUITE_P(Types, SearchAllocation,
                         ::testing::Values("flat", "ivf", "ivf:C=30,probe=30",
                                           "hnsw:M=6,efc=20,ef=50", "hnsw:M=6,efc=20,ef=3000",
                                           "flat:codec=int8", "roargraph:M=6,ef=20,beam=20",
                                           "roargraph:M=6,ef=20,beam=20,codec=none", "saap",
                                           "saap:C=30,probe=30", "sparq",
                                           "sparq:r=8,local=20,codec=int8"));

// A step of a tail: what is left of it, reading on for goals, and the state.
TEST(TailAllocation, NoneAfterReserve) {
  std::mt19937 random(82);
  KvRows kv(9000, 64, DType::f16);
  kv.add(attention_keys(9000, 64, random), gaussian(9000, 64, random));
  TailTree tree(context(), 64, DType::f16, {});
  tree.build(kv.view(), {});
  const auto queries = attention_queries(8, 64, kv.keys, random);
  std::vector<uint32_t> read;
  for (uint32_t row = 0; row < 9000; row += 30) read.push_back(row);
  std::vector<float> scores(8 * read.size(), 0.0F);
  std::vector<float> o(8 * 64);
  std::vector<float> lse(8);
  const std::vector<float> seen(8, 3.0F);
  const std::vector<float> norms(8, 1.0F);
  TailEstimate estimate;
  estimate.reserve(tree, 8);
  for (const uint32_t group : {8U, 1U, 8U}) {
    for (const TailMode mode : {TailMode::mean, TailMode::centroid, TailMode::second}) {
      const uint64_t before = allocations;
      size_t taken = read.size();
      estimate.reserve(tree, group);
      estimate.begin(tree, *context().kernels,
                     {.queries = queries.data(),
                      .group = group,
                      .logits = {0.1F, 0.0F},
                      .mode = mode,
                      .seen_lse = seen.data(),
                      .caps = nullptr},
                     {read, scores.data(), read.size()});
      const ReadGoal goal{.error = 1e-3F, .mass = 0.999F, .min_rows = 5000, .max_rows = 8000};
      for (int round = 0; round < 10; ++round) {
        const auto more = estimate.next_rows(goal, taken, norms.data());
        taken += more.size();
        estimate.take_in(seen.data());
      }
      estimate.state(kv.values.view(), {o.data(), lse.data()});
      EXPECT_EQ(allocations - before, 0U) << "group " << group;
      EXPECT_GT(taken, 5000U);
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test
