// Merging attention states: the whole equals the sum of its parts, in any grouping and order.
#include "cpu/pool.h"
#include "tests/cpu/reference.h"

namespace keyhole::cpu::test {
namespace {

/// A random partition of [0, n) into up to `parts` id lists, some of them empty.
std::vector<std::vector<uint32_t>> random_partition(Rng& rng, size_t n, size_t parts) {
  std::vector<std::vector<uint32_t>> lists(parts);
  for (uint32_t id : random_distinct_ids(rng, n, n)) lists[rng() % parts].push_back(id);
  return lists;
}

class Merge : public EveryLevel {};

TEST_P(Merge, AnyPartitionInAnyOrderAndGroupingGivesTheWhole) {
  Rng rng(31);
  for (int round = 0; round < 30; ++round) {
    const uint32_t dim = some_head_dim(round);
    const uint32_t group = keyhole::test::some_group(rng());
    const DType dtype = kDTypes[rng() % 3];
    const size_t count = rng() % 400;
    const TestRows k(count, dim, dtype, 0, gaussian(rng));
    const TestRows v(count, dim, dtype, 0, gaussian(rng));
    const auto queries = random_queries(rng, group, dim, round % 3 == 0 ? 100.0 : 1.0);
    const LogitParams logits{1.0F / std::sqrt(static_cast<float>(dim)),
                             round % 4 == 1 ? 20.0F : 0.0F};
    const KvView kv{k.view, v.view};

    std::vector<OutState> parts;
    const auto partition = random_partition(rng, count, 1 + rng() % 8);
    for (const auto& ids : partition) {
      parts.emplace_back(group, dim);
      attend_ids(kernels, kv, ids, queries.data(), group, logits, parts.back().view());
    }
    // Merge random neighbours until one is left.
    std::shuffle(parts.begin(), parts.end(), rng);
    std::vector<StateView> left;
    for (const OutState& s : parts) left.push_back(s.view());
    while (left.size() > 1) {
      const size_t n = 2 + rng() % (left.size() - 1);
      const StateView into = left[rng() % n];  // in place, into any of the inputs
      merge_states(std::span(left).first(n), group, dim, into);
      left.erase(left.begin(), left.begin() + static_cast<ptrdiff_t>(n));
      left.push_back(into);
    }
    OutState whole(group, dim);
    merge_states(left, group, dim, whole.view());

    std::vector<uint32_t> all(count);
    std::iota(all.begin(), all.end(), 0U);
    SCOPED_TRACE(testing::Message() << "round " << round << " dim " << dim << " group " << group
                                    << " count " << count << " parts " << partition.size());
    const TrueState truth = true_state(k, v, all, queries.data(), group, logits, GetParam());
    expect_state(whole, truth, 2.0);  // up to 7 merges more
    if (HasFatalFailure()) return;
  }
}

TEST_P(Merge, SameBitsForOneAndManyThreads) {
  Rng rng(32);
  const uint32_t dim = 128;
  const uint32_t group = 4;
  const size_t count = 1000;
  const TestRows k(count, dim, DType::f16, 0, gaussian(rng));
  const TestRows v(count, dim, DType::f16, 0, gaussian(rng));
  const auto queries = random_queries(rng, group, dim);
  const uint32_t parts = 10;
  const auto attend_on = [&](uint32_t threads) {
    Pool pool({.threads = threads});
    std::vector<OutState> states;
    std::vector<StateView> views;
    for (uint32_t p = 0; p < parts; ++p) states.emplace_back(group, dim);
    for (const OutState& s : states) views.push_back(s.view());
    pool.run(parts, [&](uint32_t part, uint32_t) {
      const size_t rows = count / parts;
      const KvView kv{k.view.slice(part * rows, rows), v.view.slice(part * rows, rows)};
      attend_range(kernels, kv, queries.data(), group, {0.09F, 0.0F}, views[part]);
    });
    merge_states(views, group, dim, views[0]);
    return std::move(states[0]);
  };
  const OutState one = attend_on(1);
  for (const uint32_t threads : {2, 3, 8}) {
    const OutState many = attend_on(threads);
    EXPECT_EQ(std::memcmp(one.o.data(), many.o.data(), sizeof(float) * group * dim), 0);
    EXPECT_EQ(std::memcmp(one.lse.data(), many.lse.data(), sizeof(float) * group), 0);
  }
}

KEYHOLE_FOR_EVERY_LEVEL(Merge);

TEST(MergeStates, NothingAndEmptySetsGiveTheEmptyState) {
  const uint32_t dim = 64;
  OutState out(2, dim);
  merge_states({}, 2, dim, out.view());
  for (const float x : out.o) EXPECT_EQ(x, 0.0F);
  for (const float x : out.lse) EXPECT_EQ(x, kMinusInf);

  OutState a(2, dim);
  OutState b(2, dim);
  clear_state(a.view(), 2, dim);
  clear_state(b.view(), 2, dim);
  OutState both(2, dim);
  const StateView states[] = {a.view(), b.view()};
  merge_states(states, 2, dim, both.view());
  for (const float x : both.o) EXPECT_EQ(x, 0.0F);
  for (const float x : both.lse) EXPECT_EQ(x, kMinusInf);
}

TEST(MergeStates, AnEmptySetChangesNoBitOfTheOther) {
  Rng rng(33);
  const uint32_t dim = 80;
  OutState full(3, dim);
  for (float& x : full.o) x = static_cast<float>(gaussian(rng)());
  for (float& x : full.lse) x = static_cast<float>(gaussian(rng, 1e4)());
  OutState empty(3, dim);
  clear_state(empty.view(), 3, dim);
  for (const bool first : {true, false}) {
    OutState out(3, dim);
    const StateView states[] = {first ? empty.view() : full.view(),
                                first ? full.view() : empty.view()};
    merge_states(states, 3, dim, out.view());
    EXPECT_TRUE(std::equal(full.o.begin(), full.o.end(), out.o.begin()));
    EXPECT_TRUE(std::equal(full.lse.begin(), full.lse.end(), out.lse.begin()));
  }
}

TEST(MergeStates, WeighsByLogSumExpUpToTenThousand) {
  Rng rng(34);
  const uint32_t dim = 96;
  for (const double spread : {1.0, 30.0, 1e4}) {
    for (const uint32_t n : {1, 2, 3, 17}) {
      std::vector<OutState> states;
      std::vector<StateView> views;
      for (uint32_t s = 0; s < n; ++s) {
        states.emplace_back(1, dim);
        for (float& x : states.back().o) x = static_cast<float>(gaussian(rng)());
        states.back().lse[0] = static_cast<float>(gaussian(rng, spread)());
      }
      for (const OutState& s : states) views.push_back(s.view());
      OutState out(1, dim);
      merge_states(views, 1, dim, out.view());
      double largest = -INFINITY;
      for (const OutState& s : states) largest = std::max(largest, double{s.lse[0]});
      double total = 0.0;
      for (const OutState& s : states) total += std::exp(s.lse[0] - largest);
      EXPECT_NEAR(out.lse[0], largest + std::log(total),
                  2.0 * kEpsilon * std::fabs(largest) + 1e-6);
      for (uint32_t j = 0; j < dim; ++j) {
        double exact = 0.0;
        double magnitude = 0.0;
        for (const OutState& s : states) {
          const double weight = std::exp(s.lse[0] - largest) / total;
          exact += weight * s.o[j];
          magnitude += weight * std::fabs(s.o[j]);
        }
        // exp, sum, quotient, product, sum over n; the difference of two lse near 1e4 is exact or tiny.
        EXPECT_NEAR(out.o[j], exact, kEpsilon * (2.0 * n + 8.0) * magnitude + 1e-30);
      }
    }
  }
}

TEST(MergeStates, LargestFiniteValuesStayFinite) {
  const uint32_t dim = 64;
  const float max = std::numeric_limits<float>::max();
  std::vector<OutState> states;
  std::vector<StateView> views;
  for (int s = 0; s < 7; ++s) {
    states.emplace_back(1, dim);
    std::fill(states.back().o.begin(), states.back().o.end(), max);
    states.back().lse[0] = static_cast<float>(s) * 0.1F;
  }
  for (const OutState& s : states) views.push_back(s.view());
  OutState out(1, dim);
  merge_states(views, 1, dim, out.view());
  for (const float x : out.o) EXPECT_NEAR(x / double{max}, 1.0, 1e-6);
  EXPECT_TRUE(std::isfinite(out.lse[0]));
}

// Callers merge states of their own kernels: rows longer than any head of the library's, and of odd lengths.
TEST(MergeStates, TakesRowsOfAnyLength) {
  Rng rng(35);
  for (const uint32_t dim : {1U, 7U, 255U, 256U, 257U, 300U, 512U, 5000U}) {
    for (const bool in_place : {false, true}) {
      const uint32_t heads = 3;
      std::vector<OutState> states;
      std::vector<StateView> views;
      for (int s = 0; s < 4; ++s) {
        states.emplace_back(heads, dim);
        for (float& x : states.back().o) x = static_cast<float>(gaussian(rng)());
        for (float& x : states.back().lse) x = static_cast<float>(gaussian(rng)());
      }
      states[1].lse[2] = kMinusInf;
      struct Values {
        std::vector<float> o, lse;
      };
      std::vector<Values> before;
      for (const OutState& s : states) {
        views.push_back(s.view());
        before.push_back({{s.o.begin(), s.o.end()}, {s.lse.begin(), s.lse.end()}});
      }
      OutState apart(heads, dim);
      const OutState& out = in_place ? states[2] : apart;
      merge_states(views, heads, dim, out.view());
      for (uint32_t h = 0; h < heads; ++h) {
        double total = 0.0;
        for (const Values& s : before) total += std::exp(double{s.lse[h]});
        ASSERT_NEAR(out.lse[h], std::log(total), 1e-5) << "dim " << dim << " head " << h;
        for (uint32_t j = 0; j < dim; ++j) {
          double o = 0.0;
          for (const Values& s : before) {
            o += std::exp(double{s.lse[h]}) / total * s.o[size_t{h} * dim + j];
          }
          ASSERT_NEAR(out.o[size_t{h} * dim + j], o, 1e-5)
              << "dim " << dim << " head " << h << " element " << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu::test
