// Builds with an accelerator, a made-up one: what it is asked, what becomes of its answers, and that a build whose
// accelerator declines is the build without one.
#include "index/accelerator.h"

#include <limits>

#include "cpu/quantise.h"
#include "cpu/row_access.h"
#include "index/graph/training_neighbours.h"
#include "tests/index/keys.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

/// Brute force in double precision, and k-means of the first points.
class MadeUp final : public Accelerator {
 public:
  bool declines = false;
  size_t neighbour_calls = 0, kmeans_calls = 0;
  size_t lifted_calls = 0;
  DType seen = DType::i8;  ///< of the keys of the last call
  size_t least_keys = kMaxRows, most_keys = 0;

  bool nearest_keys(const NearestTask& task, const NearestLists& lists) override {
    ++neighbour_calls;
    seen = task.keys.dtype;
    least_keys = std::min(least_keys, task.keys.tokens);
    most_keys = std::max(most_keys, task.keys.tokens);
    lifted_calls += task.key_extra != nullptr ? 1 : 0;
    if (declines) {
      const size_t width = task.thin != 0 ? task.thin : task.most;
      std::fill_n(lists.rows, task.queries.tokens * width, 0xFFFFFFFF);  // must not matter
      return false;
    }
    const cpu::Kernels& kernels = *context().kernels;
    const auto number = [&](const RowsView& rows, size_t i) {
      std::vector<float> out(rows.dim);
      kernels.to_f32[static_cast<size_t>(rows.dtype)](rows.row(i), out.data(), rows.dim);
      return out;
    };
    for (size_t q = 0; q < task.queries.tokens; ++q) {
      const std::vector<float> query = number(task.queries, q);
      std::vector<std::pair<double, uint32_t>> ranks;
      const size_t sees = task.limits != nullptr ? task.limits[q] : task.keys.tokens;
      for (size_t i = 0; i < sees; ++i) {
        const std::vector<float> key = number(task.keys, i);
        double sum = 0.0;
        for (uint32_t j = 0; j < task.keys.dim; ++j) sum += double{query[j]} * key[j];
        if (task.key_extra != nullptr) sum += double{task.query_extra[q]} * task.key_extra[i];
        ranks.emplace_back(-sum, static_cast<uint32_t>(i));
      }
      std::sort(ranks.begin(), ranks.end());
      ranks.resize(std::min<size_t>(ranks.size(), task.most));
      uint32_t* out = lists.rows + q * (task.thin != 0 ? task.thin : task.most);
      uint32_t count = 0;
      for (const auto& [score, row] : ranks) {
        if (task.thin != 0 && (row == q || count == task.thin)) continue;
        bool hidden = false;
        for (uint32_t c = 0; task.thin != 0 && c < count && !hidden; ++c) {
          const std::vector<float> chosen = number(task.keys, out[c]);
          const std::vector<float> key = number(task.keys, row);
          double sum = double{task.key_extra[out[c]]} * task.key_extra[row];
          for (uint32_t j = 0; j < task.keys.dim; ++j) sum += double{chosen[j]} * key[j];
          hidden = sum > -score;
        }
        if (!hidden) out[count++] = row;
      }
      lists.counts[q] = count;
    }
    return true;
  }

  bool kmeans(const KMeansTask& task, const KMeansResult& result) override {
    ++kmeans_calls;
    if (declines) {
      if (result.labels != nullptr) std::fill_n(result.labels, task.n, 0xFFFFFFFF);
      return false;
    }
    std::copy_n(task.points, size_t{task.config.clusters} * task.dim, result.centroids);
    if (result.labels == nullptr) return true;
    for (size_t i = 0; i < task.n; ++i) {
      double least = 1e300;
      for (uint32_t c = 0; c < task.config.clusters; ++c) {
        double sum = 0.0;
        for (uint32_t j = 0; j < task.dim; ++j) {
          const double x = task.points[i * task.dim + j] - result.centroids[c * task.dim + j];
          sum += x * x;
        }
        if (sum < least) {
          least = sum;
          result.labels[i] = c;
        }
      }
    }
    return true;
  }
  void release() override {}
};

struct AcceleratedHead {
  explicit AcceleratedHead(size_t n, uint32_t seed = 1) : random(seed), keys(n, 64, DType::f16) {
    keys.put(0, attention_keys(n, 64, random));
    training = attention_queries(200, 64, keys, random);
    for (uint32_t i = 0; i < 200; ++i) {
      positions.push_back(static_cast<uint32_t>(i * n / 200 + 20));
    }
  }
  [[nodiscard]] TrainingQueries queries() const {
    return {dense_rows(training.data(), 200, 64, DType::f32), positions.data()};
  }
  std::unique_ptr<Index> build(const char* spec, Accelerator* accelerator,
                               cpu::Pool* pool = nullptr) const {
    Context with = context(pool);
    with.accelerator = accelerator;
    auto index = make_index(spec, 64, DType::f16, with);
    BuildInput input;
    input.keys = keys.view();
    input.queries = queries();
    input.first_position = 10;
    index->build(input, {});
    return index;
  }
  [[nodiscard]] double recall(const Index& index, uint32_t k) const {
    std::mt19937 other(77);
    const std::vector<float> asked = attention_queries(40, 64, keys, other);
    double found = 0.0;
    for (size_t q = 0; q < 40; q += 4) {
      const std::vector<float> group(asked.begin() + static_cast<std::ptrdiff_t>(q * 64),
                                     asked.begin() + static_cast<std::ptrdiff_t>((q + 4) * 64));
      const Answer answer = search(index, group, 64, k);
      for (size_t h = 0; h < 4; ++h) {
        const auto best = truth(keys, group.data() + h * 64);
        for (uint32_t i = 0; i < k; ++i) {
          const auto& ids = answer.heads[h].ids;
          found += std::count(ids.begin(), ids.end(), best[i].second) != 0 ? 1.0 : 0.0;
        }
      }
    }
    return found / (40.0 * k);
  }
  std::mt19937 random;
  Keys keys;
  std::vector<float> training;
  std::vector<uint32_t> positions;
};

// Whether two indexes are the same, as far as a search that walks or probes little can tell.
void expect_same(const AcceleratedHead& head, const Index& a, const Index& b) {
  EXPECT_EQ(a.info().diagnostics, b.info().diagnostics);
  std::mt19937 other(78);
  for (int i = 0; i < 30; ++i) {
    const std::vector<float> group = attention_queries(3, 64, head.keys, other);
    const Answer x = search(a, group, 64, 12);
    const Answer y = search(b, group, 64, 12);
    ASSERT_TRUE(x.heads == y.heads) << i;
    ASSERT_EQ(x.keys_scored, y.keys_scored) << i;
  }
}

TEST(Accelerator, FindsTheNeighboursOfTrainingQueries) {
  const AcceleratedHead head(500);
  MadeUp made_up;
  Context with = context();
  with.accelerator = &made_up;
  const std::vector<uint32_t> chosen = choose_queries(head.queries(), 90);
  const Progress none;
  ProgressMeter meter(none, 1.0);
  const Neighbours theirs =
      nearest_keys(with, head.keys.view(), 10, head.queries(), chosen, 30, meter);
  EXPECT_EQ(made_up.neighbour_calls, 1U);
  const Neighbours ours =
      nearest_keys(context(), head.keys.view(), 10, head.queries(), chosen, 30, meter);
  ASSERT_EQ(theirs.counts, ours.counts);
  size_t same = 0;
  size_t all = 0;
  for (size_t q = 0; q < chosen.size(); ++q) {
    const auto a = theirs.of(q);
    const auto b = ours.of(q);
    for (size_t i = 0; i < a.size(); ++i) same += a[i] == b[i] ? 1 : 0;
    all += a.size();
  }
  EXPECT_GE(same, all - all / 100);  // double precision may order close ones otherwise
}

TEST(Accelerator, OneThatDeclinesChangesNothing) {
  const AcceleratedHead head(1500);
  for (const char* spec : {"roargraph:M=6,beam=30,Nq=20", "ivf:C=20", "saap:C=20"}) {
    SCOPED_TRACE(spec);
    MadeUp made_up;
    made_up.declines = true;
    expect_same(head, *head.build(spec, &made_up), *head.build(spec, nullptr));
    EXPECT_GE(made_up.neighbour_calls + made_up.kmeans_calls, 1U);
  }
}

TEST(Accelerator, AGraphOfExactNeighboursFindsAsMuch) {
  KEYHOLE_SKIP_WITH_TSAN();
  const AcceleratedHead head(unless_sanitized(3000, 1500));
  const char* spec = "roargraph:M=8,ef=100,beam=60,Nq=40,codec=none";
  MadeUp made_up;
  const auto theirs = head.build(spec, &made_up);
  EXPECT_EQ(made_up.neighbour_calls, 2U);
  EXPECT_EQ(made_up.lifted_calls, 1U);
  for (const auto& [name, value] : theirs->info().diagnostics) {
    if (name == "reachable_share") {
      EXPECT_EQ(value, 1.0);
    }
  }
  const auto ours = head.build(spec, nullptr);
  const double with = head.recall(*theirs, 20);
  EXPECT_GT(with, 0.7);
  EXPECT_GE(with, head.recall(*ours, 20) - 0.03);
  cpu::Pool pool({.threads = 3});
  expect_same(head, *head.build(spec, &made_up, &pool), *theirs);
}

// The accelerator gets one of each set of equal keys, and what it finds among these is found in the index.
TEST(Accelerator, SeesEqualKeysOnce) {
  KEYHOLE_SKIP_WITH_TSAN();
  AcceleratedHead head(unless_sanitized(2400, 1200));
  const size_t n = head.keys.count();
  std::vector<float> values = attention_keys(n, 64, head.random);
  for (size_t i = 0; i < n; ++i) {
    if (i % 3 == 1) std::copy_n(values.begin(), 64, values.begin() + std::ptrdiff_t(i * 64));
  }
  head.keys.put(0, values);
  MadeUp made_up;
  const auto theirs = head.build("roargraph:M=8,ef=60,beam=60,Nq=40", &made_up);
  EXPECT_EQ(made_up.neighbour_calls, 2U);
  EXPECT_EQ(made_up.most_keys, n - n / 3);
  EXPECT_EQ(made_up.least_keys, n - n / 3);
  EXPECT_EQ(diagnostic(*theirs, "reachable_share"), 1.0);
  EXPECT_EQ(diagnostic(*theirs, "twins"), static_cast<double>(n / 3));
  const auto ours = head.build("roargraph:M=8,ef=60,beam=60,Nq=40", nullptr);
  EXPECT_GT(head.recall(*theirs, 20), 0.7);
  EXPECT_GE(head.recall(*theirs, 20), head.recall(*ours, 20) - 0.05);
}

TEST(Accelerator, KeysInInt8ReachItAsWhatTheyStandFor) {
  const AcceleratedHead head(700);
  const cpu::Kernels& kernels = *context().kernels;
  for (const float widest : {1.0F, 1e6F}) {
    // A block of 188 rows too: only sessions want whole ones.
    std::vector<int8_t> rows(size_t{700} * 64);
    std::vector<uint16_t> scales(size_t{3} * 64);
    for (size_t first = 0; first < 700; first += kScaleRows) {
      cpu::ChannelQuantiser quantiser(64);
      const auto each = [&](const auto& use) {
        for (size_t i = first; i < std::min<size_t>(first + kScaleRows, 700); ++i) {
          float row[64];
          cpu::read_row(kernels, head.keys.view(), i, row);
          row[5] *= widest;
          use(row, rows.data() + i * 64);
        }
      };
      each([&](const float* row, int8_t*) { quantiser.look(row); });
      quantiser.choose_scales(std::numeric_limits<float>::max(),
                              scales.data() + first / kScaleRows * 64);
      each([&](const float* row, int8_t* to) { quantiser.write(row, to); });
    }
    RowsView keys = dense_rows(rows.data(), 700, 64, DType::i8);
    keys.scales = {scales.data(), 64, 0};
    MadeUp made_up;
    Context with = context();
    with.accelerator = &made_up;
    const std::vector<uint32_t> chosen = choose_queries(head.queries(), 50);
    const Progress none;
    ProgressMeter meter(none, 1.0);
    const Neighbours theirs = nearest_keys(with, keys, 10, head.queries(), chosen, 30, meter);
    const Neighbours ours = nearest_keys(context(), keys, 10, head.queries(), chosen, 30, meter);
    EXPECT_EQ(made_up.neighbour_calls, 1U);
    EXPECT_EQ(made_up.seen, widest == 1.0F ? DType::f16 : DType::f32) << "what fits";
    EXPECT_EQ(theirs.counts, ours.counts);
    size_t same = 0, all = 0;
    for (size_t q = 0; q < chosen.size(); ++q) {
      for (uint32_t i = 0; i < ours.counts[q]; ++i, ++all) {
        const uint32_t* list = theirs.rows.data() + q * theirs.per_query;
        same += std::count(list, list + theirs.counts[q], ours.rows[q * ours.per_query + i]);
      }
    }
    EXPECT_GE(same, all * 98 / 100) << "of the last ones fp16 may exchange a few";
  }
}

TEST(Accelerator, ClustersForPartitions) {
  const AcceleratedHead head(1200);
  for (const char* spec : {"ivf:C=24,probe=6", "saap:C=24,probe=6"}) {
    SCOPED_TRACE(spec);
    MadeUp made_up;
    const auto index = head.build(spec, &made_up);
    EXPECT_GE(made_up.kmeans_calls, 1U);
    EXPECT_GT(head.recall(*index, 10), 0.3);
    EXPECT_EQ(index->count(), 1200U);
  }
}

TEST(Accelerator, AppendsGoOnWithoutIt) {
  const AcceleratedHead head(900);
  MadeUp made_up;
  Context with = context();
  with.accelerator = &made_up;
  auto index = make_index("roargraph:M=6,beam=30,Nq=20", 64, DType::f16, with);
  BuildInput input;
  input.keys = head.keys.view(800);
  input.queries = head.queries();
  index->build(input, {});
  const size_t calls = made_up.neighbour_calls;
  index->append(head.keys.view(), {});
  EXPECT_EQ(index->count(), 900U);
  EXPECT_EQ(made_up.neighbour_calls, calls);
}

}  // namespace
}  // namespace keyhole::index::test
