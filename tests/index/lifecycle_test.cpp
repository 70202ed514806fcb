// Append, truncate, append anew, rebuild, save and load in random order: after any of them the index
// answers for exactly the rows that it has.
#include <sstream>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

// Exact after operations in any order.
constexpr const char* kLifecycleSpecs[] = {
    "flat",
    "ivf:C=12,probe=16777216,segment=100,iters=2,codec=none",
    "ivf:train=global,probe=16777216,segment=150,iters=1,metric=ip,codec=none",
    "hnsw:M=4,ef=100000,efc=12",
    "roargraph:M=4,ef=100000,beam=12",
    "saap:C=12,probe=12,iters=2,codec=none",
    "sparq:r=64"};

void expect_right(const Index& index, const Keys& keys, std::mt19937& random) {
  ASSERT_EQ(index.count(), keys.count());
  EXPECT_EQ(index.info().count, keys.count());
  const uint32_t k = 1 + random() % (random() % 2 == 0 ? 40 : 8);
  const auto queries = attention_queries(2, keys.dim(), keys, random);
  const Answer answer = search(index, queries, keys.dim(), k);
  for (uint32_t h = 0; h < 2; ++h) {
    expect_exact(answer.heads[h], keys, queries.data() + size_t{h} * keys.dim(), k);
  }
}

class Lifecycle : public ::testing::TestWithParam<const char*> {};

TEST_P(Lifecycle, RandomOperations) {
  constexpr size_t kCapacity = 700;
  for (uint32_t seed = 0; seed < cases(12); ++seed) {
    std::mt19937 random(seed);
    const DType dtype = key_dtypes()[seed % 3];
    Keys keys(kCapacity, 64, dtype);
    auto index = make_index(GetParam(), 64, dtype, context());
    for (int step = 0; step < 14; ++step) {
      const uint32_t kind = random() % 10;
      SCOPED_TRACE("seed " + std::to_string(seed) + " step " + std::to_string(step) + " kind " +
                   std::to_string(kind) + " count " + std::to_string(keys.count()));
      if (kind < 5) {  // a block of rows that were never there, of new content
        const size_t n =
            std::min<size_t>(random() % (kind == 0 ? 400 : 60), kCapacity - keys.count());
        keys.put(keys.count(), attention_keys(n, 64, random));
        index->append(keys.view(), {});
      } else if (kind < 8) {
        const size_t count = random() % (keys.count() + 1);
        keys.poison(count);  // before: truncation must not need the rows that it drops
        index->truncate(count);
      } else if (kind == 8) {
        BuildInput input;
        input.keys = keys.view();
        index->build(input, {});
      } else {
        std::stringstream bytes;
        index->save(bytes);
        const auto loaded = make_index(GetParam(), 64, dtype, context());
        loaded->load(bytes, keys.view());
        const auto queries = attention_queries(2, 64, keys, random);
        EXPECT_EQ(search(*index, queries, 64, 8).heads, search(*loaded, queries, 64, 8).heads);
        index->load(bytes.seekg(0), keys.view());
      }
      expect_right(*index, keys, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Members of a family share what they hold until one changes it: each answers for its own rows, and memory is counted
// once.
TEST_P(Lifecycle, CopiesThatShareAnswerForTheirOwnRows) {
  constexpr size_t kCapacity = 500, kMost = 5;
  struct Member {
    std::unique_ptr<Keys> keys;
    std::unique_ptr<Index> index;
  };
  for (uint32_t seed = 0; seed < cases(8); ++seed) {
    std::mt19937 random(seed);
    const DType dtype = key_dtypes()[seed % 3];
    std::vector<Member> family;
    family.push_back({std::make_unique<Keys>(kCapacity, 64, dtype),
                      make_index(GetParam(), 64, dtype, context())});
    for (int step = 0; step < 30; ++step) {
      const uint32_t kind = step == 0 ? 0 : random() % 10;
      const size_t at = random() % family.size();
      Keys& keys = *family[at].keys;
      std::unique_ptr<Index>& index = family[at].index;
      SCOPED_TRACE("seed " + std::to_string(seed) + " step " + std::to_string(step) + " kind " +
                   std::to_string(kind) + " count " + std::to_string(keys.count()));
      if (kind < 3) {
        const size_t n =
            std::min<size_t>(random() % (kind == 0 ? 300 : 60), kCapacity - keys.count());
        keys.put(keys.count(), attention_keys(n, 64, random));
        index->append(keys.view(), {});
      } else if (kind < 5) {
        const size_t count = random() % (keys.count() + 1);
        keys.poison(count);
        index->truncate(count);
      } else if (kind == 5) {
        std::stringstream bytes;
        index->save(bytes);
        index->load(bytes.seekg(0), keys.view());
        EXPECT_EQ(index->bytes_of_others(), 0U);
      } else if (kind == 6 && family.size() > 1) {  // in any order, and with its keys
        keys.poison(0);
        family.erase(family.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (family.size() < kMost) {
        auto copy = std::make_unique<Keys>(keys);
        auto other = index->share(copy->view());
        EXPECT_EQ(other->bytes(), index->bytes());
        EXPECT_EQ(other->bytes_of_others(), index->bytes());
        EXPECT_EQ(other->info().params, index->info().params);
        family.push_back({std::move(copy), std::move(other)});
      }
      for (const Member& member : family) {
        expect_right(*member.index, *member.keys, random);
        EXPECT_LE(member.index->bytes_of_others(), member.index->bytes());
      }
      if (family.size() == 1) {
        EXPECT_EQ(family[0].index->bytes_of_others(), 0U);
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(Lifecycle, TruncateBeyondTheEndChangesNothing) {
  std::mt19937 random(21);
  Keys keys(100, 64, DType::f16);
  keys.put(0, gaussian(100, 64, random));
  const auto index = built(GetParam(), keys);
  index->truncate(100);
  index->truncate(1000);
  expect_right(*index, keys, random);
}

TEST_P(Lifecycle, AppendRefusesFewerRowsThanItHas) {
  std::mt19937 random(22);
  Keys keys(100, 64, DType::f16);
  keys.put(0, gaussian(100, 64, random));
  const auto index = built(GetParam(), keys);
  EXPECT_THROW(index->append(keys.view(99), {}), Error);
  expect_right(*index, keys, random);
}

INSTANTIATE_TEST_SUITE_P(Types, Lifecycle, ::testing::ValuesIn(kLifecycleSpecs));

// At the effort of daily use: growth block by block must not cost recall.
TEST(Append, BlockByBlockFindsWhatOneBuildFinds) {
  std::mt19937 random(23);
  constexpr size_t kRows = 1500;
  Keys keys(kRows, 64, DType::f16);
  keys.put(0, attention_keys(kRows, 64, random));
  for (const char* spec : {"ivf:segment=512,probe=12", "hnsw:M=8,ef=64,efc=60",
                           "saap:C=24,probe=12", "sparq:r=24", "sparq:r=24,codec=int8"}) {
    SCOPED_TRACE(spec);
    const auto whole = built(spec, keys);
    const auto grown = make_index(spec, 64, DType::f16, context());
    for (size_t count = 150; count <= kRows; count += 150) grown->append(keys.view(count), {});
    std::mt19937 a(24);
    std::mt19937 b(24);
    const double recall_whole = mean_recall(*whole, keys, 20, 12, a);
    const double recall_grown = mean_recall(*grown, keys, 20, 12, b);
    EXPECT_GT(recall_whole, 0.6);
    EXPECT_GT(recall_grown, recall_whole - 0.1);
  }
}

TEST(Append, HnswGrowsTheSameGraphHoweverItIsCut) {
  // The first rows say what the lift, its centre and the scales are, of both.
  std::mt19937 random(25);
  Keys keys(600, 64, DType::f32);
  keys.put(0, gaussian(600, 64, random));
  const auto whole = make_index("hnsw:M=6,efc=40,ef=10", 64, DType::f32, context());
  const auto grown = make_index("hnsw:M=6,efc=40,ef=10", 64, DType::f32, context());
  for (const size_t count : {50, 600}) whole->append(keys.view(count), {});
  for (const size_t count : {50, 51, 53, 400, 600}) grown->append(keys.view(count), {});
  for (int i = 0; i < 20; ++i) {
    const auto queries = gaussian(2, 64, random);
    EXPECT_EQ(search(*whole, queries, 64, 10).heads, search(*grown, queries, 64, 10).heads);
  }
}

TEST(Truncate, HnswKeepsItsRecall) {
  std::mt19937 random(26);
  Keys keys(1200, 64, DType::f16);
  keys.put(0, attention_keys(1200, 64, random));
  const auto index = built("hnsw:M=8,ef=64,efc=60", keys);
  keys.poison(700);
  index->truncate(700);
  const auto fresh = built("hnsw:M=8,ef=64,efc=60", keys);
  std::mt19937 a(27);
  std::mt19937 b(27);
  EXPECT_GT(mean_recall(*index, keys, 20, 12, a), mean_recall(*fresh, keys, 20, 12, b) - 0.1);
  EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
}

}  // namespace
}  // namespace keyhole::index::test
