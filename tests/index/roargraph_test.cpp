// The query-guided graph and its parts: what training neighbours are, what pruning keeps, that everything can
// be reached, and the key sets on which graphs are known to fail.
#include <array>
#include <numeric>
#include <sstream>
#include <thread>

#include "index/graph/edge_pruner.h"
#include "index/graph/guided_graph.h"
#include "index/graph/training_neighbours.h"
#include "index/scan/key_codes.h"
#include "index/scan/select.h"
#include "tests/index/keys.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

// Keys with queries that guide: both from the distributions of synthetic.h.
struct TrainedHead {
  TrainedHead(size_t n, size_t queries, uint32_t seed, uint32_t dim = 64)
      : random(seed), keys(n, dim, DType::f16) {
    keys.put(0, attention_keys(n, dim, random));
    training = attention_queries(queries, dim, keys, random);
  }
  [[nodiscard]] TrainingQueries queries() const {
    return {dense_rows(training.data(), training.size() / keys.dim(), keys.dim(), DType::f32),
            positions.empty() ? nullptr : positions.data()};
  }
  [[nodiscard]] std::unique_ptr<Index> build(const std::string& spec, size_t count,
                                             cpu::Pool* pool = nullptr) const {
    auto index = make_index(spec, keys.dim(), keys.dtype(), context(pool));
    BuildInput input;
    input.keys = keys.view(count);
    input.queries = queries();
    index->build(input, {});
    return index;
  }
  std::mt19937 random;
  Keys keys;
  std::vector<float> training;
  std::vector<uint32_t> positions;
};

TEST(TrainingNeighbours, AreTheExactOnesThatAQueryCanSee) {
  for (uint32_t seed = 0; seed < cases(12); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    TrainedHead head(1 + seed * 97 % 700, 40, seed);
    const uint32_t first = 30;  // position of row 0
    const bool known = seed % 3 != 0;
    for (size_t q = 0; known && q < 40; ++q) {
      head.positions.push_back(static_cast<uint32_t>(head.random() % 800));
    }
    cpu::Pool pool({.threads = 3});
    const std::vector<uint32_t> chosen = choose_queries(head.queries(), 25);
    ASSERT_EQ(chosen.size(), 25U);
    EXPECT_TRUE(std::is_sorted(chosen.begin(), chosen.end(), std::less_equal<>()));
    const Progress none;
    ProgressMeter meter(none, 1.0);
    const Neighbours found =
        nearest_keys(context(seed % 2 == 0 ? &pool : nullptr), head.keys.view(), first,
                     head.queries(), chosen, 10, meter);
    for (size_t i = 0; i < chosen.size(); ++i) {
      std::vector<uint32_t> expected;
      for (const auto& [score, row] : truth(head.keys, head.training.data() + chosen[i] * 64)) {
        if (known && first + row > head.positions[chosen[i]]) continue;
        if (expected.size() < 10) expected.push_back(row);
      }
      const auto near = found.of(i);
      EXPECT_EQ(std::vector<uint32_t>(near.begin(), near.end()), expected);
    }
  }
}

TEST(TrainingNeighbours, FewQueriesAreAllChosenAndLateOnesAreFavoured) {
  const TrainedHead head(50, 400, 1);
  EXPECT_EQ(choose_queries(head.queries(), 1000).size(), 400U);
  EXPECT_TRUE(choose_queries({}, 10).empty());
  const auto some = choose_queries(head.queries(), 40);
  EXPECT_GT(std::count_if(some.begin(), some.end(), [](uint32_t q) { return q >= 200; }), 25);
  EXPECT_LT(some.front(), 100U);
}

TEST(EdgePruner, KeepsTheNearestAndHidesWhoeverIsBehindThem) {
  // Points on a line, lifted: 0 | 1 2 3 ... on one side and one point on the other.
  Keys keys(7, 64, DType::f32);
  std::vector<float> values(7 * 64, 0.0F);
  const std::array<float, 7> place = {0, 1, 2, 3, 4, 5, -4.5F};
  for (size_t i = 0; i < 7; ++i) values[i * 64] = place[i];
  keys.put(0, values);
  const LiftedKeys lifted(*context().kernels, keys.view(), {.radius = 100.0, .center = {}}, {});
  EdgePruner pruner(lifted);
  const std::vector<uint32_t> all = {5, 4, 3, 2, 1, 6, 6, 0};
  const auto as_vector = [](std::span<const uint32_t> s) {
    return std::vector<uint32_t>(s.begin(), s.end());
  };
  EXPECT_EQ(as_vector(pruner.prune(0, all, 0, 5, false)), (std::vector<uint32_t>{1, 6}));
  EXPECT_EQ(as_vector(pruner.prune(0, all, 0, 5, true)), (std::vector<uint32_t>{1, 6, 2, 3, 4}));
  EXPECT_EQ(as_vector(pruner.prune(0, all, 0, 1, true)), (std::vector<uint32_t>{1}));
  // What was chosen beforehand stays, and hides the others of its side: 5 hides 4 and 3 and 2, not 1.
  const auto kept = as_vector(pruner.prune(0, all, 1, 5, false));
  EXPECT_EQ(kept[0], 5U);
  EXPECT_TRUE(pruner.prune(0, std::vector<uint32_t>{0, 0}, 0, 4, true).empty());
  EXPECT_TRUE(pruner.prune(0, {}, 0, 4, true).empty());
}

TEST(Select, AgreesWithSorting) {
  std::mt19937 random(3);
  for (uint32_t round = 0; round < 300; ++round) {
    std::vector<float> x(1 + random() % 200);
    for (float& v : x) v = static_cast<float>(static_cast<int>(random() % 61) - 30);
    const auto largest = std::max_element(x.begin(), x.end());
    EXPECT_EQ(position_of_largest(x.data(), x.size()), static_cast<size_t>(largest - x.begin()));
    EXPECT_EQ(
        count_above(x.data(), x.size(), 3.0F),
        static_cast<size_t>(std::count_if(x.begin(), x.end(), [](float v) { return v > 3; })));
    std::vector<float> sorted = x;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const size_t k = 1 + random() % x.size();
    EXPECT_EQ(kth_largest(x.data(), x.size(), k), sorted[k - 1]);
    EXPECT_EQ(kth_largest(x.data(), x.size(), x.size() + 1), kMinusInf);
  }
}

TEST(KeyCodes, ScoresAreWithinTheirBound) {
  for (uint32_t seed = 0; seed < cases(20); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const uint32_t dim = head_dims()[seed % head_dims().size()];
    const size_t n = 2 + random() % 300;
    Keys keys(n, dim, key_dtypes()[seed % 3]);
    keys.put(0, attention_keys(n, dim, random));
    KeyCodes codes(*context().kernels, dim);
    codes.build(keys.view(), keys.count());
    const uint32_t group = 1 + random() % 5;
    const auto queries = attention_queries(group, dim, keys, random);
    KeyCodes::Queries encoded;
    codes.encode_queries(queries.data(), group, encoded);
    std::vector<float> scores(group * keys.count());
    codes.score(encoded, codes.row(0), nullptr, keys.count(), scores.data(), keys.count());
    for (uint32_t h = 0; h < group; ++h) {
      const float* query = queries.data() + size_t{h} * dim;
      // The constant of a query: the mean difference. Each score is within the bound of it twice over.
      double shift = 0.0;
      for (uint32_t i = 0; i < keys.count(); ++i) {
        shift += (keys.score(i, query) - scores[h * keys.count() + i]) / double(keys.count());
      }
      for (uint32_t i = 0; i < keys.count(); ++i) {
        EXPECT_LE(std::abs(keys.score(i, query) - shift - scores[h * keys.count() + i]),
                  2 * code_error_bound(codes, query, dim) + 1e-3);
      }
    }
    // Codes made later, and codes loaded, are the same bytes.
    KeyCodes grown(*context().kernels, dim);
    grown.build(keys.view(), 0);
    grown.truncate(1);
    grown.append(grown.encode(keys.view(), 1));
    ASSERT_EQ(grown.count(), keys.count());
    EXPECT_EQ(std::memcmp(grown.row(0), codes.row(0), keys.count() * codes.stride()), 0);
  }
}

TEST(RoarGraph, EveryKeyIsReachableAndListsKeepTheirWidth) {
  for (const char* spec : {"roargraph:M=4,beam=20", "roargraph:M=16,Nq=50", "roargraph:M=2,Nq=2"}) {
    SCOPED_TRACE(spec);
    const TrainedHead head(1500, 300, 5);
    const auto index = head.build(spec, 1500);
    EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
    EXPECT_GT(diagnostic(*index, "mean_degree"), 1.0);
    EXPECT_EQ(diagnostic(*index, "training_queries"), 300.0);
    EXPECT_GT(diagnostic(*index, "distinct_pivots"), 50.0);
    EXPECT_GE(diagnostic(*index, "unguided_share"), 0.0);
    EXPECT_LT(diagnostic(*index, "unguided_share"), 1.0);
  }
}

TEST(RoarGraph, IsTheSameForAnyNumberOfThreads) {
  const TrainedHead head(1200, 200, 6);
  const auto bytes = [&](cpu::Pool* pool) {
    std::ostringstream out;
    head.build("roargraph:M=8,beam=30", 1200, pool)->save(out);
    return out.str().substr(64);  // what comes before holds the time that the build took
  };
  cpu::Pool one({.threads = 1});
  cpu::Pool eight({.threads = 8});
  const std::string alone = bytes(nullptr);
  // The checksum at the end covers the time too.
  const auto body = [](const std::string& b) { return b.substr(40, b.size() - 48); };
  EXPECT_EQ(body(bytes(&one)), body(alone));
  EXPECT_EQ(body(bytes(&eight)), body(alone));
}

TEST(RoarGraph, QueriesGuideIt) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  // Queries far from all keys: a graph that has seen their like finds more for the same beam.
  TrainedHead head(6000, 3000, 7);
  const auto guided = head.build("roargraph:M=8,ef=24", 6000);
  head.training.clear();
  const auto unguided = head.build("roargraph:M=8,ef=24", 6000);
  std::mt19937 a(8);
  std::mt19937 b(8);
  const double with = mean_recall(*guided, head.keys, 30, 20, a);
  const double without = mean_recall(*unguided, head.keys, 30, 20, b);
  EXPECT_GT(with, without);
  EXPECT_GT(with, 0.6);
}

TEST(RoarGraph, RecallGrowsWithTheBeamUpToOne) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  const TrainedHead head(4000, 500, 9);
  std::stringstream saved;
  head.build("roargraph:M=8", 4000)->save(saved);
  double last = -1.0;
  for (const char* ef : {"4", "16", "64", "200", "250"}) {
    const auto index = make_index(std::string("roargraph:M=8,ef=") + ef, 64, DType::f16, context());
    index->load(saved.seekg(0), head.keys.view());
    std::mt19937 queries(10);
    const double now = mean_recall(*index, head.keys, 20, 10, queries);
    EXPECT_GT(now, last - 0.01) << ef;
    last = now;
  }
  EXPECT_EQ(last, 1.0) << "an ef of a sixteenth of all scans them";
}

TEST(RoarGraph, Int8WalksFindWhatFullPrecisionFinds) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  const TrainedHead head(5000, 800, 11);
  const auto coded = head.build("roargraph:M=8,ef=40", 5000);
  const auto plain = head.build("roargraph:M=8,ef=40,codec=none", 5000);
  std::mt19937 a(12);
  std::mt19937 b(12);
  EXPECT_NEAR(mean_recall(*coded, head.keys, 20, 20, a), mean_recall(*plain, head.keys, 20, 20, b),
              0.02);
}

TEST(RoarGraph, AppendedBlocksReachTheRecallOfARebuiltIndex) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  const TrainedHead head(4000, 800, 13);
  const auto grown = head.build("roargraph:M=8,ef=32", 2000);
  for (size_t n = 2000; n < 4000; n += 100) grown->append(head.keys.view(n + 100), {});
  EXPECT_EQ(diagnostic(*grown, "reachable_share"), 1.0);
  const auto rebuilt = head.build("roargraph:M=8,ef=32", 4000);
  std::mt19937 a(14);
  std::mt19937 b(14);
  const double now = mean_recall(*grown, head.keys, 20, 30, a);
  EXPECT_GT(now, mean_recall(*rebuilt, head.keys, 20, 30, b) - 0.05);
  // And back: the rows that are left are still all there.
  grown->truncate(1000);
  EXPECT_EQ(diagnostic(*grown, "reachable_share"), 1.0);
  EXPECT_EQ(grown->count(), 1000U);
}

// Sets on which graphs are known to fail: every answer must be sound, and exact where the beam covers all.
TEST(RoarGraph, Traps) {
  KEYHOLE_SKIP_WITH_SANITIZERS();
  struct Trap {
    const char* name;
    std::vector<float> keys;
    std::vector<float> queries;
  };
  std::mt19937 random(17);
  std::vector<Trap> traps;
  const auto noise = gaussian(900, 64, random);
  traps.push_back({"all equal", std::vector<float>(900 * 64, 0.5F), gaussian(50, 64, random)});
  traps.push_back({"all zero", std::vector<float>(900 * 64, 0.0F), gaussian(50, 64, random)});
  Trap outliers{"outlier norms", noise, gaussian(50, 64, random)};
  for (size_t i = 0; i < outliers.keys.size(); i += 64 * 100) {
    for (size_t j = 0; j < 64; ++j) outliers.keys[i + j] *= 200.0F;
  }
  traps.push_back(outliers);
  Trap doubles{"duplicates", noise, gaussian(50, 64, random)};
  for (size_t i = 1; i < 900; i += 2) {
    std::copy_n(doubles.keys.begin() + static_cast<std::ptrdiff_t>((i - 1) * 64), 64,
                doubles.keys.begin() + static_cast<std::ptrdiff_t>(i * 64));
  }
  traps.push_back(doubles);
  traps.push_back({"one query", noise, gaussian(1, 64, random)});
  traps.push_back({"the same query", noise, std::vector<float>(64 * 64, 0.25F)});
  traps.push_back({"no query", noise, {}});
  traps.push_back({"zero queries", noise, std::vector<float>(20 * 64, 0.0F)});
  traps.push_back({"one key", gaussian(1, 64, random), gaussian(9, 64, random)});
  traps.push_back({"two keys", gaussian(2, 64, random), gaussian(9, 64, random)});
  traps.push_back({"fewer keys than links", gaussian(7, 64, random), gaussian(9, 64, random)});
  for (const Trap& trap : traps) {
    for (const char* spec :
         {"roargraph:ef=8", "roargraph:ef=8,Nq=2,M=2,codec=none", "roargraph:ef=100000"}) {
      SCOPED_TRACE(std::string(trap.name) + " " + spec);
      TrainedHead head(0, 0, 18);
      head.keys = Keys(trap.keys.size() / 64, 64, DType::f16);
      head.keys.put(0, trap.keys);
      head.training = trap.queries;
      const auto index = head.build(spec, head.keys.count());
      EXPECT_EQ(diagnostic(*index, "reachable_share"), 1.0);
      const auto queries = gaussian(3, 64, random);
      const Answer answer = search(*index, queries, 64, 10);
      for (uint32_t h = 0; h < 3; ++h) {
        const float* query = queries.data() + size_t{h} * 64;
        expect_sound(answer.heads[h], head.keys, query);
        EXPECT_EQ(answer.heads[h].ids.size(), std::min<size_t>(10, head.keys.count()));
        if (std::string(spec) == "roargraph:ef=100000") {
          expect_exact(answer.heads[h], head.keys, query, 10);
        }
      }
    }
  }
}

TEST(RoarGraph, AppendsAreWorkedOutWhileOthersSearch) {
  const TrainedHead head(2600, 200, 19);
  const auto index = head.build("roargraph:M=6,ef=16,beam=20", 2000);
  std::mt19937 random(20);
  const auto queries = attention_queries(2, 64, head.keys, random);
  for (size_t n = 2000; n < 2600; n += 150) {
    const Answer before = search(*index, queries, 64, 10);
    std::unique_ptr<Addition> addition;
    std::thread builder([&] { addition = index->prepare_append(head.keys.view(n + 150), {}); });
    for (int i = 0; i < 30; ++i) EXPECT_EQ(search(*index, queries, 64, 10).heads, before.heads);
    builder.join();
    index->commit_append(std::move(addition));
    EXPECT_EQ(index->count(), n + 150);
    for (uint32_t h = 0; h < 2; ++h) {
      expect_sound(search(*index, queries, 64, 10).heads[h], head.keys, queries.data() + h * 64);
    }
  }
  // A full list drops its furthest link for a new one, which may have been the only one to its row: some rows in ten
  // thousand. The build repairs that, appends do not.
  EXPECT_GT(diagnostic(*index, "reachable_share"), 0.995);
}

}  // namespace
}  // namespace keyhole::index::test
