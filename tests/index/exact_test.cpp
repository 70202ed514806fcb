// What must be exact is: flat always, ivf and saap where every list is probed, graphs where k or the beam covers
// all, sparq where it reads all components.
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr const char* kExactSpecs[] = {"flat",
                                       "ivf:C=16,probe=16,segment=64,iters=2",
                                       "ivf:C=9,probe=9,train=global,metric=ip,center=0,iters=2",
                                       "hnsw:M=8,ef=100000,efc=20",
                                       "roargraph:M=8,ef=100000,beam=20",
                                       "saap:C=11,probe=11,iters=2",
                                       "sparq:r=576"};

// Random shapes, dtypes, groups and k, against double precision.
TEST(Exact, RandomShapes) {
  for (uint32_t seed = 0; seed < cases(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[random() % head_dims().size()];
    const DType dtype = key_dtypes()[random() % 3];
    const size_t n = random() % (seed % 4 == 0 ? 20 : 700);
    const uint32_t group = keyhole::test::some_group(random());
    const uint32_t k = 1 + random() % (seed % 3 == 0 ? 1000 : (seed % 3 == 1 ? 60 : 12));
    Keys keys(n, dim, dtype);
    keys.put(0, seed % 2 == 0 ? attention_keys(n, dim, random) : gaussian(n, dim, random));
    const auto queries = attention_queries(group, dim, keys, random);
    for (const char* spec : kExactSpecs) {
      SCOPED_TRACE(spec);
      const auto index = built(spec, keys);
      EXPECT_EQ(index->count(), n);
      const Answer answer = search(*index, queries, dim, k);
      for (uint32_t h = 0; h < group; ++h) {
        expect_exact(answer.heads[h], keys, queries.data() + size_t{h} * dim, k);
      }
    }
  }
}

// Integers: every inner product is exact and many tie, so rows are compared one by one.
TEST(Exact, TiesGoToTheSmallerRow) {
  for (uint32_t seed = 0; seed < cases(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const size_t n = 1 + random() % 600;
    const uint32_t k = 1 + random() % (seed % 2 == 0 ? 700 : 15);
    Keys keys(n, 64, key_dtypes()[seed % 3]);
    keys.put(0, integers(n, 64, random));
    const auto queries = integers(4, 64, random);
    for (const char* spec : kExactSpecs) {
      SCOPED_TRACE(spec);
      const Answer answer = search(*built(spec, keys), queries, 64, k);
      for (uint32_t h = 0; h < 4; ++h) {
        const auto all = truth(keys, queries.data() + h * 64);
        ASSERT_EQ(answer.heads[h].ids.size(), std::min<size_t>(k, n));
        for (size_t i = 0; i < answer.heads[h].ids.size(); ++i) {
          ASSERT_EQ(answer.heads[h].ids[i], all[i].second) << "rank " << i;
        }
      }
    }
  }
}

TEST(Exact, IvfOverAllListsGivesTheBitsOfFlat) {
  std::mt19937 random(5);
  Keys keys(3000, 128, DType::f16);
  keys.put(0, attention_keys(3000, 128, random));
  const auto flat = built("flat", keys);
  const auto ivf = built("ivf:C=60,probe=60,segment=1000", keys);
  for (int i = 0; i < 5; ++i) {
    const auto queries = attention_queries(4, 128, keys, random);
    const Answer a = search(*flat, queries, 128, 100);
    const Answer b = search(*ivf, queries, 128, 100);
    EXPECT_EQ(a.heads, b.heads);
    EXPECT_EQ(a.keys_scored, 4U * 3000U);
    EXPECT_EQ(b.keys_scored, 4U * 3000U);
  }
}

TEST(Exact, EmptyIndexAnswersNothing) {
  Keys keys(0, 128, DType::f16);
  std::mt19937 random(6);
  const auto queries = gaussian(3, 128, random);
  for (const char* spec : {"flat", "ivf", "hnsw", "roargraph", "saap", "sparq"}) {
    for (const bool build : {false, true}) {
      const auto index = make_index(spec, 128, DType::f16, context());
      BuildInput input;
      input.keys = keys.view();
      if (build) index->build(input, {});
      const Answer answer = search(*index, queries, 128, 10);
      for (const Found& found : answer.heads) EXPECT_TRUE(found.ids.empty());
      EXPECT_EQ(answer.keys_scored, 0U);
      EXPECT_EQ(index->count(), 0U);
      EXPECT_NO_THROW(static_cast<void>(index->info()));
    }
  }
}

TEST(Exact, OneRow) {
  std::mt19937 random(7);
  Keys keys(1, 80, DType::bf16);
  keys.put(0, gaussian(1, 80, random));
  const auto queries = gaussian(2, 80, random);
  for (const char* spec :
       {"flat", "ivf", "ivf:C=1024,probe=1", "hnsw", "hnsw:geometry=ip", "flat:codec=int8",
        "roargraph", "roargraph:ef=1", "saap", "sparq", "sparq:codec=int8,local=3"}) {
    SCOPED_TRACE(spec);
    const Answer answer = search(*built(spec, keys), queries, 80, 5);
    for (uint32_t h = 0; h < 2; ++h) {
      expect_exact(answer.heads[h], keys, queries.data() + h * 80, 5);
    }
  }
}

// What breaks clusterings and graphs: rows all alike, one far longer than the rest, fewer rows than
// lists, scores around 1e4 of both signs.
TEST(Exact, AdversarialKeys) {
  std::mt19937 random(8);
  const size_t n = 500;
  const auto one = gaussian(1, 64, random);
  std::vector<float> equal;
  for (size_t i = 0; i < n; ++i) equal.insert(equal.end(), one.begin(), one.end());
  std::vector<float> outlier = gaussian(n, 64, random);
  for (size_t j = 0; j < 64; ++j) outlier[77 * 64 + j] *= 1000.0F;
  std::vector<float> huge = gaussian(n, 64, random);
  for (float& x : huge) x *= 500.0F;
  const std::vector<float> zero(n * 64, 0.0F);
  std::vector<float> two_values = equal;
  for (size_t i = 0; i < n; i += 2) {
    for (size_t j = 0; j < 64; ++j) two_values[i * 64 + j] = -two_values[i * 64 + j];
  }
  const std::vector<float> few = gaussian(5, 64, random);
  for (const std::vector<float>& values : {equal, outlier, huge, zero, two_values, few}) {
    Keys keys(n, 64, DType::f16);
    keys.put(0, values);
    auto queries = gaussian(3, 64, random);
    for (float& x : queries) x *= 3.0F;
    for (const char* spec :
         {"flat", "ivf:C=64,probe=64,codec=none", "ivf:C=100000,probe=100000,metric=ip,codec=none",
          "hnsw:ef=1000,efc=40", "hnsw:M=2,ef=1000,efc=1", "roargraph:ef=1000,beam=40",
          "saap:C=64,probe=64,codec=none", "saap:C=100000,probe=100000,codec=none", "sparq:r=64"}) {
      SCOPED_TRACE(spec);
      const auto index = built(spec, keys);
      for (const uint32_t k : {1U, 10U, 50U, 499U, 500U, 2000U}) {
        const Answer answer = search(*index, queries, 64, k);
        for (uint32_t h = 0; h < 3; ++h) {
          expect_exact(answer.heads[h], keys, queries.data() + h * 64, k);
        }
      }
    }
  }
}

TEST(Exact, StridedRowsAreReadInPlace) {
  std::mt19937 random(9);
  const size_t n = 300;
  // Rows of 64 fp32 every 100 floats, as in an interleaved cache.
  std::vector<float> memory = gaussian(n, 100, random);
  Keys keys(n, 64, DType::f32);
  std::vector<float> dense;
  for (size_t i = 0; i < n; ++i) {
    dense.insert(dense.end(), memory.begin() + static_cast<std::ptrdiff_t>(i * 100),
                 memory.begin() + static_cast<std::ptrdiff_t>(i * 100 + 64));
  }
  keys.put(0, dense);
  const auto queries = gaussian(4, 64, random);
  for (const char* spec : kExactSpecs) {
    SCOPED_TRACE(spec);
    const auto index = make_index(spec, 64, DType::f32, context());
    BuildInput input;
    input.keys = dense_rows(memory.data(), n, 64, DType::f32);
    input.keys.token_stride = 100;
    index->build(input, {});
    const Answer answer = search(*index, queries, 64, 40);
    for (uint32_t h = 0; h < 4; ++h) {
      expect_exact(answer.heads[h], keys, queries.data() + h * 64, 40);
    }
  }
}

TEST(Exact, MaximalFloatsDoNotBreakABuild) {
  std::mt19937 random(10);
  Keys keys(200, 64, DType::f32);
  std::vector<float> values = gaussian(200, 64, random);
  for (size_t i = 0; i < values.size(); i += 64) values[i] = i % 128 == 0 ? 3e38F : -3e38F;
  keys.put(0, values);
  const auto queries = gaussian(2, 64, random);
  for (const char* spec : {"flat", "ivf:C=8,probe=8", "hnsw:ef=1000", "roargraph:ef=1000",
                           "saap:C=8,probe=8", "sparq", "sparq:codec=int8"}) {
    SCOPED_TRACE(spec);
    const Answer answer = search(*built(spec, keys), queries, 64, 200);
    for (const Found& found : answer.heads) EXPECT_EQ(found.ids.size(), 200U);
  }
}

}  // namespace
}  // namespace keyhole::index::test
