// Graphs of keys of which many are equal: what lies beside and among them is found, whatever their share, after
// appends, truncation, copies and files.
#include <random>
#include <sstream>

#include "index/graph/training_neighbours.h"
#include "index/scan/twins.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

constexpr uint32_t kTwinDim = 64;

// A share of the keys are one of a few keys; each query wants a key that is there once.
struct Alike {
  Alike(size_t n, double share, size_t different, uint32_t seed, DType dtype = DType::f16)
      : random(seed), keys(n, kTwinDim, dtype) {
    values = gaussian(n, kTwinDim, random);
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    const auto alike = static_cast<size_t>(share * static_cast<double>(n));
    for (size_t i = different; i < alike; ++i) {
      std::copy_n(values.begin() + at(order[i % different]), kTwinDim,
                  values.begin() + at(order[i]));
    }
    keys.put(0, values);
    single.assign(order.begin() + static_cast<std::ptrdiff_t>(alike), order.end());
    for (size_t i = 0; i < 600; ++i)
      add_query(training, 1.0F, 0.3F, static_cast<uint32_t>(random() % n));
  }
  static std::ptrdiff_t at(uint32_t row) {
    return static_cast<std::ptrdiff_t>(row * size_t{kTwinDim});
  }

  void add_query(std::vector<float>& queries, float length, float noise, uint32_t row) {
    for (const float x : gaussian(1, kTwinDim, random)) queries.push_back(noise * x);
    float* query = queries.data() + queries.size() - kTwinDim;
    for (uint32_t j = 0; j < kTwinDim; ++j) query[j] += length * values[row * size_t{kTwinDim} + j];
  }
  [[nodiscard]] std::unique_ptr<Index> build(const std::string& spec, size_t count) const {
    auto index = make_index(spec, kTwinDim, keys.dtype(), context());
    BuildInput input;
    input.keys = keys.view(count);
    input.queries.rows =
        dense_rows(training.data(), training.size() / kTwinDim, kTwinDim, DType::f32);
    index->build(input, {});
    return index;
  }

  std::mt19937 random;
  Keys keys;
  std::vector<float> values;
  std::vector<uint32_t> single;  // rows whose keys no other row has
  std::vector<float> training;
};

// How much searches for single keys, two heads of three, and for keys of any row find.
struct Figures {
  double single;  // share of the single keys that are found
  double recall;  // mean share of the best k
};

// Whatever they find must be right, and explored rows must be complete: with a key all rows that have it.
Figures figures(const Index& index, Alike& alike, uint32_t k = 10) {
  Figures sum = {0.0, 0.0};
  constexpr int kGroups = 25;
  const size_t n = index.count();
  Keys keys = alike.keys;
  keys.poison(n);
  const auto representative = Twins::among(*context().kernels, keys.view()).representatives(n);
  const auto scratch = index.make_scratch(3, k);
  for (int i = 0; i < kGroups; ++i) {
    std::vector<float> queries;
    uint32_t wanted[3];
    for (int h = 0; h < 3; ++h) {
      wanted[h] = h < 2 ? alike.single[alike.random() % alike.single.size()]
                        : static_cast<uint32_t>(alike.random() % n);
      alike.add_query(queries, 3.0F, 0.1F, wanted[h]);
    }
    const Answer answer = search(index, queries, kTwinDim, k, *scratch);
    for (size_t h = 0; h < 3; ++h) {
      const float* query = queries.data() + h * kTwinDim;
      const std::vector<uint32_t>& ids = answer.heads[h].ids;
      expect_sound(answer.heads[h], keys, query);
      EXPECT_EQ(ids.size(), std::min<size_t>(k, n));
      sum.recall += recall(answer.heads[h], keys, query, k) / (3 * kGroups);
      if (h < 2)
        sum.single += double(std::count(ids.begin(), ids.end(), wanted[h])) / (2 * kGroups);
    }
    Scored scored;
    index.explore({.queries = queries.data(), .group = 3, .k = k}, *scratch, scored);
    std::vector<uint8_t> times(n + 1, 0);
    size_t wrong = 0;
    for (size_t r = 0; r < scored.rows.size(); ++r) {
      ++times[std::min<size_t>(scored.rows[r], n)];
      for (size_t h = 0; scored.exact && h < 3; ++h) {
        const double score = keys.score(scored.rows[r], queries.data() + h * kTwinDim);
        const double error = std::abs(scored.scores[h * scored.stride + r] - score);
        wrong += error > 1e-3 * (1 + std::abs(score)) ? 1 : 0;
      }
    }
    EXPECT_EQ(wrong, 0U) << "scores";
    EXPECT_LE(*std::max_element(times.begin(), times.end() - 1), 1) << "a row came twice";
    EXPECT_EQ(times[n], 0) << "rows that do not exist";
    for (uint32_t row = 0; row < n; ++row)
      wrong += times[row] != times[representative[row]] ? 1 : 0;
    EXPECT_EQ(wrong, 0U) << "rows without others of the same key";
    EXPECT_EQ(scored.keys_scored, answer.keys_scored);
  }
  return sum;
}

void expect_found(const Index& index, Alike& alike, double least_single, double least_recall) {
  const Figures found = figures(index, alike);
  EXPECT_GE(found.single, least_single);
  EXPECT_GE(found.recall, least_recall);
}

constexpr const char* kTwinSpecs[] = {"hnsw:M=16,ef=120,efc=100", "roargraph:M=8,ef=50,beam=60",
                                      "roargraph:M=8,ef=50,beam=60,codec=none"};

class TwinGraphs : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr size_t kRows = unless_sanitized(2000, 900);
};

TEST_P(TwinGraphs, WhatLiesBesideEqualKeysIsFoundWhateverTheirShare) {
  const std::vector<double> shares = {0.02, 0.1, 0.3, 0.6, 0.98, 0.9};
  for (const double share : unless_sanitized(shares, 2)) {
    for (const size_t different : {1, 7}) {
      SCOPED_TRACE(std::to_string(share) + " of " + std::to_string(different) + " keys");
      Alike alike(kRows, share, different, 31);
      const auto index = alike.build(GetParam(), kRows);
      expect_found(*index, alike, 0.96, 0.9);
      EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
      EXPECT_EQ(diagnostic(*index, "twins"), std::floor(share * kRows) - double(different));
      EXPECT_EQ(index->info().warning, "");
    }
  }
}

TEST_P(TwinGraphs, ASearchForMoreThanThereAreDifferentKeysReturnsTheirTwins) {
  // Every key is one of five: all that is asked for is found, each head's best rows in order.
  Alike alike(kRows, 0.99, 5, 32);
  const auto index = alike.build(GetParam(), kRows);
  std::vector<float> queries;
  for (int h = 0; h < 3; ++h) alike.add_query(queries, 1.0F, 0.5F, alike.single[0]);
  const auto k = static_cast<uint32_t>(kRows / 32 - 1);  // a few more, and the rows are scanned
  ASSERT_GT(k, alike.single.size() + 5) << "more than there are different keys";
  const Answer answer = search(*index, queries, kTwinDim, k);
  EXPECT_LE(answer.keys_scored, 3 * 3 * (alike.single.size() + 5)) << "twins are not scored";
  for (size_t h = 0; h < 3; ++h) {
    const float* query = queries.data() + h * kTwinDim;
    expect_exact(answer.heads[h], alike.keys, query, k);
    EXPECT_EQ(recall(answer.heads[h], alike.keys, query, k), 1.0) << "of equals, the lower rows";
  }
}

TEST_P(TwinGraphs, AppendsInBlocksAndTruncationsKeepThem) {
  for (const double share : {0.3, 0.9}) {
    SCOPED_TRACE(share);
    Alike alike(kRows, share, 3, 33);
    const auto index = alike.build(GetParam(), kRows / 2);
    for (size_t n = kRows / 2; n < kRows; n += kRows / 10) {
      index->append(alike.keys.view(n + kRows / 10), {});
    }
    ASSERT_EQ(index->count(), kRows);
    expect_found(*index, alike, 0.96, 0.8);
    EXPECT_GT(diagnostic(*index, "reachable_share"), 0.995);

    // Into the middle of the twins, with nothing behind that could be read; then rows of other content come.
    Alike other(kRows, share, 5, 34);
    const size_t cut = kRows * 2 / 3;
    const auto erase = [&](const Alike& of) {
      std::erase_if(alike.single, [&](uint32_t row) { return row >= cut; });
      const auto from = of.values.begin() + Alike::at(static_cast<uint32_t>(cut));
      std::copy(from, of.values.end(),
                alike.values.begin() + Alike::at(static_cast<uint32_t>(cut)));
    };
    erase(other);
    alike.keys.poison(cut);
    index->truncate(cut);
    expect_found(*index, alike, 0.96, 0.8);
    EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
    alike.keys.put(0, alike.values);
    index->append(alike.keys.view(), {});
    expect_found(*index, alike, 0.96, 0.8);
    index->truncate(1);
    EXPECT_EQ(diagnostic(*index, "twins"), 0.0);
    index->truncate(0);
    index->append(alike.keys.view(), {});
    expect_found(*index, alike, 0.96, 0.8);
  }
}

TEST_P(TwinGraphs, EveryRowMayBeTheSame) {
  for (const float value : {0.0F, 0.5F}) {
    Keys keys(kRows, kTwinDim, DType::f16);
    keys.put(0, std::vector<float>(kRows * kTwinDim, value));
    const auto index = make_index(GetParam(), kTwinDim, DType::f16, context());
    for (const size_t n : {size_t{1}, size_t{2}, kRows / 2, kRows}) {
      index->append(keys.view(n), {});
      EXPECT_EQ(diagnostic(*index, "twins"), static_cast<double>(n - 1));
      EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
      const Answer answer = search(*index, std::vector<float>(kTwinDim, 1.0F), kTwinDim, 10);
      std::vector<uint32_t> first(std::min<size_t>(n, 10));
      for (uint32_t i = 0; i < first.size(); ++i) first[i] = i;
      EXPECT_EQ(answer.heads[0].ids, first);
    }
  }
}

TEST_P(TwinGraphs, AFileHasThemAgain) {
  Alike alike(kRows, 0.7, 4, 35);
  const auto index = alike.build(GetParam(), kRows);
  std::stringstream bytes;
  index->save(bytes);
  const auto loaded = make_index(GetParam(), kTwinDim, DType::f16, context());
  loaded->load(bytes, alike.keys.view());
  for (int i = 0; i < 20; ++i) {
    const auto queries = gaussian(3, kTwinDim, alike.random);
    EXPECT_EQ(search(*loaded, queries, kTwinDim, 10).heads,
              search(*index, queries, kTwinDim, 10).heads);
  }
  EXPECT_EQ(loaded->info().diagnostics, index->info().diagnostics);
  EXPECT_EQ(saved_bytes(*loaded), saved_bytes(*index));
}

// A file of a library that knew no twins, or a forged one: its graph links rows whose keys are equal. The same is a
// file of different keys, loaded over others.
TEST_P(TwinGraphs, AGraphThatLinksEqualKeysIsPutRight) {
  for (const double share : unless_sanitized(std::vector<double>{0.1, 0.5, 0.95, 1.0}, 2)) {
    SCOPED_TRACE(share);
    Alike different(kRows, 0.0, 1, 36);
    std::stringstream bytes;
    different.build(GetParam(), kRows)->save(bytes);
    Alike alike(kRows, share, 2, 36);
    if (alike.single.empty()) alike.single.push_back(0);
    const auto index = make_index(GetParam(), kTwinDim, DType::f16, context());
    index->load(bytes, alike.keys.view());
    EXPECT_EQ(diagnostic(*index, "twins"), std::floor(share * kRows) - 2);
    EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
    expect_found(*index, alike, 0.96, 0.8);
    index->truncate(kRows / 2);
    EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
    index->append(alike.keys.view(), {});
    expect_found(*index, alike, 0.96, 0.7);
  }
}

TEST_P(TwinGraphs, CopiesShareThemUntilOneChanges) {
  Alike alike(kRows, 0.8, 3, 37);
  const auto index = alike.build(GetParam(), kRows);
  const Keys other = alike.keys;
  const auto copy = index->share(other.view());
  EXPECT_EQ(copy->bytes(), index->bytes());
  EXPECT_EQ(copy->bytes_of_others(), index->bytes());
  copy->truncate(kRows / 2);
  EXPECT_EQ(copy->bytes_of_others(), 0U);
  EXPECT_LT(diagnostic(*copy, "twins"), diagnostic(*index, "twins"));
  expect_found(*index, alike, 0.96, 0.9);
}

INSTANTIATE_TEST_SUITE_P(Types, TwinGraphs, ::testing::ValuesIn(kTwinSpecs));

TEST(TwinGraph, HnswGrowsTheSameGraphHoweverItIsCut) {
  Alike alike(900, 0.6, 4, 38);
  const char* spec = "hnsw:M=6,efc=40,ef=10";
  const auto whole = make_index(spec, kTwinDim, DType::f16, context());
  const auto grown = make_index(spec, kTwinDim, DType::f16, context());
  for (const size_t count : {50, 900}) whole->append(alike.keys.view(count), {});
  for (const size_t count : {50, 51, 53, 400, 401, 900}) grown->append(alike.keys.view(count), {});
  for (int i = 0; i < 20; ++i) {
    const auto queries = gaussian(2, kTwinDim, alike.random);
    EXPECT_EQ(search(*whole, queries, kTwinDim, 10).heads,
              search(*grown, queries, kTwinDim, 10).heads);
  }
}

// What a training query learns from are different keys, as many as it asks for, of those that it sees.
TEST(TwinGraph, TrainingQueriesHaveDifferentNeighbours) {
  Alike alike(700, 0.8, 6, 39);
  const Twins twins = Twins::among(*context().kernels, alike.keys.view());
  const std::vector<uint32_t> distinct = twins.distinct(700);
  std::vector<uint32_t> positions;
  for (size_t q = 0; q < 600; ++q) positions.push_back(static_cast<uint32_t>(alike.random() % 800));
  const TrainingQueries queries{dense_rows(alike.training.data(), 600, kTwinDim, DType::f32),
                                positions.data()};
  const std::vector<uint32_t> chosen = choose_queries(queries, 50);
  const Progress none;
  ProgressMeter meter(none, 1.0);
  const Neighbours found =
      nearest_keys(context(), alike.keys.view(), 30, queries, chosen, 20, meter, distinct);
  for (size_t i = 0; i < chosen.size(); ++i) {
    std::vector<uint32_t> expected;
    for (const auto& [score, row] :
         truth(alike.keys, alike.training.data() + chosen[i] * kTwinDim)) {
      if (30 + row > positions[chosen[i]] || expected.size() == 20) continue;
      if (std::binary_search(distinct.begin(), distinct.end(), row)) expected.push_back(row);
    }
    const auto near = found.of(i);
    EXPECT_EQ(std::vector<uint32_t>(near.begin(), near.end()), expected);
  }
}

}  // namespace
}  // namespace keyhole::index::test
