#include <array>
#include <sstream>

#include "index/graph/beam_search.h"
#include "index/graph/graph_repair.h"
#include "index/graph/hnsw_builder.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

TEST(Hnsw, RecallGrowsWithTheBeamUpToOne) {
  std::mt19937 random(51);
  Keys keys(2000, 64, DType::f16);
  keys.put(0, attention_keys(2000, 64, random));
  std::stringstream graph;
  built("hnsw:M=8,efc=60", keys)->save(graph);
  double last = -1.0;
  for (const char* ef : {"10", "100", "700", "2000"}) {
    const auto index =
        make_index(std::string("hnsw:M=8,efc=60,ef=") + ef, 64, DType::f16, context());
    index->load(graph.seekg(0), keys.view());
    std::mt19937 queries(52);
    const double now = mean_recall(*index, keys, 10, 8, queries);
    EXPECT_GT(now, last - 1e-9);
    last = now;
  }
  EXPECT_EQ(last, 1.0) << "a lifted graph is wholly reachable";
}

// Rows that are inserted link to the newest of equal keys. Were it the oldest, a few rows would take all links, and
// one row in a hundred could be reached here.
TEST(Hnsw, EqualKeysAreReachableBeforeAnyRepair) {
  std::mt19937 random(61);
  Keys keys(3000, 64, DType::f16);
  const auto different = attention_keys(40, 64, random);
  std::vector<float> values;
  for (size_t i = 0; i < 3000; ++i) {
    const auto* row = different.data() + i % 40 * 64;
    values.insert(values.end(), row, row + 64);
  }
  keys.put(0, values);
  const cpu::Kernels& kernels = *context().kernels;
  const LiftedKeys lifted(kernels, keys.view(), Lift::of(kernels, keys.view(), {}, 1.0), {});
  const Progress no_progress;
  ProgressMeter meter(no_progress, 1.0);
  const Graph graph =
      insert_rows(Graph(0, 32, 16), lifted, {.m = 16, .ef_construction = 100}, meter);
  EXPECT_GT(measure(graph).reachable_share, 0.95);
}

// Level l holds about one row in M^l, and every link leads to a row of its level.
TEST(Hnsw, LevelsThinOutGeometrically) {
  std::mt19937 random(62);
  Keys keys(4000, 64, DType::f16);
  keys.put(0, gaussian(4000, 64, random));
  const LiftedKeys lifted(*context().kernels, keys.view(), {}, {});
  const Progress no_progress;
  ProgressMeter meter(no_progress, 1.0);
  const HnswConfig config = {.m = 4, .ef_construction = 20};
  const Graph graph = insert_rows(Graph(0, 8, 4), lifted, config, meter);
  size_t at_least[3] = {};
  for (const Graph::Tower& tower : graph.towers()) {
    for (uint32_t l = 1; l <= std::min(tower.levels, 3U); ++l) ++at_least[l - 1];
  }
  EXPECT_NEAR(static_cast<double>(at_least[0]), 1000.0, 120.0);
  EXPECT_NEAR(static_cast<double>(at_least[1]), 250.0, 70.0);
  EXPECT_NEAR(static_cast<double>(at_least[2]), 62.5, 35.0);
  for (uint32_t t = 0; t < graph.towers().size(); ++t) {
    EXPECT_GE(graph.towers()[graph.entry_tower()].levels, graph.towers()[t].levels);
    for (uint32_t l = 1; l <= graph.towers()[t].levels; ++l) {
      for (const uint32_t target : graph.upper_links(t, l)) {
        EXPECT_NE(target, t);
        EXPECT_GE(graph.towers()[target].levels, l);
      }
    }
  }
}

// The failure that the lift is for: edges by raw inner product leave a torn graph of few links.
TEST(Hnsw, RawInnerProductCollapsesAndTheLiftDoesNot) {
  std::mt19937 random(53);
  Keys keys(2000, 64, DType::f16);
  keys.put(0, attention_keys(2000, 64, random));
  const auto lift = built("hnsw:M=16,efc=60,ef=100", keys);
  const auto raw = built("hnsw:M=16,efc=60,ef=100,geometry=ip", keys);
  EXPECT_GT(diagnostic(*lift, "mean_degree"), 8.0);
  EXPECT_LT(diagnostic(*raw, "mean_degree"), 4.0);
  EXPECT_EQ(diagnostic(*lift, "reachable_share"), 1.0);
  EXPECT_LT(diagnostic(*raw, "reachable_share"), 0.6);
}

TEST(Hnsw, CountsWhatItScores) {
  std::mt19937 random(54);
  Keys keys(2000, 128, DType::f16);
  keys.put(0, gaussian(2000, 128, random));
  const auto index = built("hnsw:M=8,efc=40,ef=50", keys);
  const auto one = gaussian(1, 128, random);
  std::vector<float> two = one;
  two.insert(two.end(), one.begin(), one.end());
  const Answer a = search(*index, one, 128, 10);
  const Answer b = search(*index, two, 128, 10);
  EXPECT_GE(a.keys_scored, 50U);
  EXPECT_LT(a.keys_scored, 2000U);
  EXPECT_EQ(b.keys_scored, 2 * a.keys_scored);
  EXPECT_GT(a.bytes_read, a.keys_scored * 256);
  EXPECT_EQ(b.heads[0], a.heads[0]);
  EXPECT_EQ(b.heads[1], a.heads[0]);
}

TEST(Hnsw, WideSearchesScan) {
  std::mt19937 random(59);
  Keys keys(960, 64, DType::f16);
  keys.put(0, gaussian(960, 64, random));
  const auto index = built("hnsw:M=4,efc=10,ef=1,geometry=ip", keys);
  const auto queries = gaussian(2, 64, random);
  EXPECT_LT(search(*index, queries, 64, 29).keys_scored, 2U * 960U);
  for (const uint32_t k : {30U, 500U, 5000U}) {
    const Answer answer = search(*index, queries, 64, k);
    EXPECT_EQ(answer.keys_scored, 2U * 960U);
    for (uint32_t h = 0; h < 2; ++h)
      expect_exact(answer.heads[h], keys, queries.data() + h * 64, k);
  }
}

TEST(Beam, FindsWhatAFullSortFinds) {
  // On a complete graph nothing is out of reach.
  for (uint32_t seed = 0; seed < cases(40); ++seed) {
    std::mt19937 random(seed);
    const uint32_t nodes = 2 + random() % 60;
    std::vector<uint32_t> all(nodes);
    for (uint32_t i = 0; i < nodes; ++i) all[i] = i;
    struct Complete {
      const std::vector<uint32_t>* rows;
      std::span<const uint32_t> operator()(uint32_t) const { return *rows; }
      void prefetch(uint32_t) const {}
    };
    std::vector<float> values(nodes);
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 21) - 10);
    const auto score = [&](const uint32_t* ids, size_t n, float* out) {
      for (size_t i = 0; i < n; ++i) out[i] = values[ids[i]];
    };
    const size_t ef = 1 + random() % 70;
    Beam beam;
    beam.reserve(nodes, nodes, ef);
    for (int repeat = 0; repeat < 2; ++repeat) {
      beam.search(std::array{nodes - 1}, ef, Complete{&all}, score);
      EXPECT_EQ(beam.scored(), nodes);
      std::vector<uint64_t> expected;
      for (uint32_t i = 0; i < nodes; ++i) expected.push_back(pack_rank(values[i], i));
      std::sort(expected.begin(), expected.end(), std::greater<>());
      ASSERT_EQ(beam.size(), std::min<size_t>(ef, nodes));
      for (size_t i = 0; i < beam.size(); ++i) EXPECT_EQ(beam.rank(i), expected[i]);
    }
  }
}

TEST(Hnsw, KeysLongerThanTheBuildsAreFoundAfterAppend) {
  std::mt19937 random(55);
  Keys keys(800, 64, DType::f16);
  auto values = gaussian(800, 64, random);
  for (size_t i = 500 * 64; i < values.size(); ++i) values[i] *= 5.0F;
  keys.put(0, values);
  const auto index = make_index("hnsw:M=8,efc=60,ef=60", 64, DType::f16, context());
  BuildInput input;
  input.keys = keys.view(500);
  index->build(input, {});
  index->append(keys.view(), {});
  EXPECT_GT(mean_recall(*index, keys, 10, 10, random), 0.8);
}

// A chain 0 -> 1 -> ... with nothing leading back, and islands.
Graph chain(size_t nodes, uint32_t width, size_t island) {
  Graph graph(nodes, width, 2);
  for (uint32_t i = 0; i + 1 < nodes; ++i) {
    if ((i + 1) % island != 0) graph.slots(i)[0] = i + 1;
  }
  graph.choose_entry();
  return graph;
}

TEST(Graph, ReachableShareFollowsLinks) {
  EXPECT_EQ(measure(chain(100, 4, 1000)).reachable_share, 1.0);
  EXPECT_EQ(measure(chain(100, 4, 25)).reachable_share, 0.25);
  EXPECT_EQ(measure(chain(100, 4, 1)).reachable_share, 0.01);
  EXPECT_EQ(measure(chain(100, 4, 1)).mean_degree, 0.0);
}

TEST(GraphRepair, ConnectsIslandsEvenWhereNoSlotIsFree) {
  std::mt19937 random(56);
  Keys keys(120, 64, DType::f32);
  keys.put(0, gaussian(120, 64, random));
  LiftedKeys lifted(*context().kernels, keys.view(),
                    Lift::of(*context().kernels, keys.view(), {}, 1.0), {});
  // Cliques of 4 with full lists (width 3): nothing leads from one to another.
  Graph graph(120, 3, 2);
  for (uint32_t i = 0; i < 120; ++i) {
    uint32_t* slot = graph.slots(i);
    for (uint32_t j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
      if (j != i) *slot++ = j;
    }
  }
  graph.choose_entry();
  ASSERT_LT(measure(graph).reachable_share, 0.1);
  connect_all(graph, lifted);
  EXPECT_EQ(measure(graph).reachable_share, 1.0);
}

TEST(GraphRepair, RemovedRowsLeaveNoLinkAndNoHole) {
  std::mt19937 random(57);
  Keys keys(60, 64, DType::f32);
  keys.put(0, gaussian(60, 64, random));
  // 0 -> 50 -> 51 -> 1, 2, 3: rows 1..3 hang on rows that go.
  Graph graph(60, 4, 2);
  graph.slots(0)[0] = 50;
  graph.slots(50)[0] = 51;
  for (uint32_t i = 0; i < 3; ++i) graph.slots(51)[i] = i + 1;
  graph.add_tower(10, 1);
  graph.add_tower(55, 2);
  graph.upper_slots(0, 1)[0] = 1;
  graph.upper_slots(1, 1)[0] = 0;
  graph.choose_entry();
  ASSERT_EQ(graph.entry_row(), 55U);
  const RowsView rest = keys.view(50);
  LiftedKeys lifted(*context().kernels, rest, {.radius = 100.0, .center = {}}, {});
  remove_rows(graph, lifted);
  EXPECT_EQ(graph.nodes(), 50U);
  EXPECT_EQ(graph.entry_row(), 10U);
  EXPECT_EQ(graph.towers().size(), 1U);
  EXPECT_TRUE(graph.upper_links(0, 1).empty());
  ASSERT_FALSE(graph.links(0).empty());
  for (const uint32_t link : graph.links(0)) EXPECT_TRUE(link >= 1 && link <= 3) << link;
}

/// s * (key - center) of row i, in double.
std::vector<double> placed(const Keys& keys, const Lift& lift, const std::vector<float>& scale,
                           size_t i) {
  float row[kMaxHeadDim];
  const RowsView view = keys.view();
  context().kernels->to_f32[static_cast<size_t>(view.dtype)](view.row(i), row, view.dim);
  std::vector<double> x(view.dim);
  for (uint32_t j = 0; j < view.dim; ++j)
    x[j] = double{scale[j]} * (row[j] - double{lift.center[j]});
  return x;
}

TEST(LiftedKeys, LiftedKeysAreTheirOwnNearest) {
  std::mt19937 random(58);
  std::uniform_real_distribution<float> unit(0.2F, 3.0F);
  for (const float offset : {0.0F, 30.0F}) {
    Keys keys(300, 64, DType::f32);
    std::vector<float> rows = attention_keys(300, 64, random);
    std::vector<float> scale(64);
    for (float& s : scale) s = unit(random);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = (rows[i] + (i % 7 == 0 ? offset : 0.0F));
    keys.put(0, rows);
    const Lift lift = Lift::of(*context().kernels, keys.view(), scale, 1.0);
    LiftedKeys lifted(*context().kernels, keys.view(), lift, scale);
    const double radius = lift.radius;
    std::vector<uint32_t> ids(300);
    for (uint32_t i = 0; i < 300; ++i) ids[i] = i;
    std::vector<float> similarity(300);
    LiftedKeys::Query query;
    for (uint32_t i = 0; i < 300; ++i) {
      lifted.load(i, query);
      lifted.similarity(query, ids.data(), 300, similarity.data());
      EXPECT_NEAR(similarity[i], radius * radius, 1e-4 * radius * radius);
      EXPECT_EQ(std::max_element(similarity.begin(), similarity.end()) - similarity.begin(), i);
      const auto x = placed(keys, lift, scale, i);
      for (uint32_t other = 0; other < 300; other += 37) {
        const auto y = placed(keys, lift, scale, other);
        double sum = 0.0, xx = 0.0, yy = 0.0;
        for (uint32_t j = 0; j < 64; ++j) sum += x[j] * y[j], xx += x[j] * x[j], yy += y[j] * y[j];
        sum += std::sqrt(std::max(0.0, radius * radius - xx)) *
               std::sqrt(std::max(0.0, radius * radius - yy));
        EXPECT_NEAR(similarity[other], sum, 1e-4 * radius * radius) << i << " " << other;
      }
    }
  }
}

TEST(LiftedKeys, ACopyForAnAcceleratorIsWhatIsLifted) {
  std::mt19937 random(59);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Keys keys(50, 80, dtype);
    keys.put(0, attention_keys(50, 80, random));
    std::vector<float> scale(80, 1.0F);
    scale[3] = 0.01F;
    scale[9] = 50.0F;
    const Lift lift = Lift::of(*context().kernels, keys.view(), scale, 1.0);
    const LiftedKeys lifted(*context().kernels, keys.view(), lift, scale);
    const std::vector<std::byte> copy = lifted.copy();
    const size_t row_bytes = 80 * dtype_size(lifted.copy_dtype());
    ASSERT_EQ(copy.size(), 50 * row_bytes);
    for (size_t i = 0; i < 50; ++i) {
      float row[80];
      context().kernels->to_f32[static_cast<size_t>(lifted.copy_dtype())](
          copy.data() + i * row_bytes, row, 80);
      const auto x = placed(keys, lift, scale, i);
      for (uint32_t j = 0; j < 80; ++j) {
        EXPECT_NEAR(row[j], x[j], 1e-3 * std::abs(x[j]) + 1e-7) << i << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::index::test
