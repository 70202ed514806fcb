// Codes in lists: what a step over the chosen ones gives against the same sums in double, which ones it chooses, and
// that every row is in one list, once, as rows come and go.
#include "index/scan/code_lists.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <sstream>

#include "cpu/attention.h"
#include "cpu/attention_state.h"
#include "index/scan/code_scan.h"
#include "index/types/codes.h"
#include "tests/index/keys.h"
#include "tests/index/listed_heads.h"
#include "tests/relative_error.h"
#include "tests/sanitized.h"

namespace keyhole::index::test {
namespace {

using keyhole::test::relative_error;

/// The state of the chosen lists' rows by their codes and of the other lists by second order, in double.
ListedState truth_of(const ListedStep& step) {
  const CodeSearch& s = step.search;
  const CodeLists& lists = *s.rows.lists;
  const CodeShape& shape = s.shape();
  const uint32_t dim = shape.dim;
  ListedState out(s.group, dim);
  std::vector<float> q(size_t{s.group} * dim);
  rotate_queries(lists.balance(), s.queries, s.group, q.data());
  const auto chosen = step.choice.chosen();
  std::vector<float> value(dim);
  for (uint32_t h = 0; h < s.group; ++h) {
    const float* row = q.data() + size_t{h} * dim;
    double norm = 0.0;
    for (uint32_t j = 0; j < dim; ++j) norm += double{row[j]} * row[j];
    std::vector<double> o(dim, 0.0);
    double sum = 0.0;
    double cap = 1e30;  // of what a list's logit is believed to be
    const auto logit_of = [&](double score) {
      const double logit = s.logits.scale * score;
      return s.logits.softcap > 0.0F ? s.logits.softcap * std::tanh(logit / s.logits.softcap)
                                     : logit;
    };
    const auto add = [&](double score, double variance, double n, const float* v) {
      double logit = s.logits.scale * score, slope = s.logits.scale;
      if (s.logits.softcap > 0.0F) {
        const double t = std::tanh(logit / s.logits.softcap);
        slope *= 1.0 - t * t;
        logit = s.logits.softcap * t;
      }
      // A row by its code (variance below 0), or n rows by their mean: of many or, at large variances, of the heaviest.
      const double t = slope * slope * norm * variance, many = std::log(n);
      const double expected = t < 0.0           ? std::max(0.5 * t, -1.0)
                              : t <= 2.0 * many ? 0.5 * t
                                                : std::sqrt(2.0 * t * many) - many;
      const double weight = n * std::exp(std::min(cap, logit + expected));
      sum += weight;
      for (uint32_t j = 0; j < dim; ++j) o[j] += weight * v[j];
    };
    double heaviest = -1e30;
    for (size_t l = 0; l < lists.lists(); ++l) {
      const CodeRunReader run(shape, lists.run(l));
      double mean = 0.0;
      for (uint32_t j = 0; j < dim; ++j) mean += double{row[j]} * run.key_mean(j);
      heaviest = std::max(heaviest, logit_of(mean));
    }
    for (size_t c = 0; c < lists.chunks(); ++c) {
      for (size_t l = lists.first_list(c); l < lists.first_list(c + 1); ++l) {
        const CodeRunReader run(shape, lists.run(l));
        double mean = 0.0;
        for (uint32_t j = 0; j < dim; ++j) mean += double{row[j]} * run.key_mean(j);
        if (!std::binary_search(chosen.begin(), chosen.end(), static_cast<uint32_t>(l))) {
          for (uint32_t j = 0; j < dim; ++j) value[j] = run.value_mean(j);
          cap = heaviest;
          add(mean, lists.chunk(c).spreads[l - lists.first_list(c)],
              static_cast<double>(lists.ids(l).size()), value.data());
          continue;
        }
        cap = 1e30;
        for (uint32_t i = 0; i < lists.ids(l).size(); ++i) {
          double product = 0.0;
          for (uint32_t j = 0; j < dim; ++j) product += double{row[j]} * run.key_level(i, j);
          const double f = run.key_factor(i);
          run.rotated_value(i, value.data());
          add(mean + f * product, -f * f * run.noise(), 1.0, value.data());
        }
      }
    }
    float* to = out.o.data() + size_t{h} * dim;
    for (uint32_t j = 0; j < dim; ++j) {
      to[j] = lists.balance().value_scale * static_cast<float>(o[j] / sum);
    }
    rotate_codes_back(to, dim);
    out.lse[h] = static_cast<float>(std::log(sum));
  }
  return out;
}

TEST(CodeLists, EveryLevelGivesTheSumsInDouble) {
  std::random_device seed;
  uint32_t number = seed();
  SCOPED_TRACE("seed " + std::to_string(number));
  for (const uint32_t dim : {64U, 80U, 128U, 256U}) {
    for (const char* bits : {"k=1,v=0", "k=2,v=2", "k=4,v=1", "k=2,v=4"}) {
      if (++number % keyhole::test::unless_sanitized(2, 5) != 0) continue;
      const ListedHead head(2600, dim, number);
      const auto index = head.index(std::string("codes:") + bits + ",lists=24,read=25,miss=0");
      const uint32_t group = 1 + number % 6;
      const LogitParams logits{0.1F, number % 3 == 0 ? 8.0F : 0.0F};
      for (const cpu::Level level : cpu::available_levels()) {
        SCOPED_TRACE(std::string(cpu::level_name(level)) + " " + bits + " d " +
                     std::to_string(dim));
        ListedStep step(*cpu::kernels_for(level), *index, head.queries.data(), group, logits, 0);
        step.choose();
        EXPECT_GT(step.choice.chosen_rows(), 0U);
        EXPECT_LT(step.choice.chosen_rows(), 2560U);
        step.attend(head.kv());
        const ListedState truth = truth_of(step);
        for (uint32_t h = 0; h < group; ++h) {
          EXPECT_NEAR(step.coded.lse[h], truth.lse[h], 0.06);  // queries of 8 bits
          EXPECT_LT(relative_error(&step.coded.o[h * dim], &truth.o[h * dim], dim), 0.08);
        }
      }
    }
  }
}

TEST(CodeLists, AllListsAndAllRowsAreExactAttention) {
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    const ListedHead head(1000, 64, seed);
    const auto index = head.index("codes:k=1,v=1,lists=16,read=100");
    const LogitParams logits{0.3F, 0.0F};
    ListedStep step(cpu::select_kernels(), *index, head.queries.data(), 3, logits, kMostExactRows);
    step.choose();
    EXPECT_EQ(step.choice.chosen_rows(), 768U);
    step.attend(head.kv());
    std::vector<uint32_t> rows = step.rows;
    std::sort(rows.begin(), rows.end());
    ASSERT_EQ(rows.size(), 768U);
    for (uint32_t i = 0; i < 768; ++i) ASSERT_EQ(rows[i], i);
    for (const float lse : step.coded.lse) EXPECT_EQ(lse, kMinusInf);
  }
}

TEST(CodeLists, ChosenRowsLeaveTheState) {
  const ListedHead head(4000, 64, 4);
  const auto index = head.index("codes:k=2,v=2,lists=32,read=40,miss=0");
  ListedStep with(cpu::select_kernels(), *index, head.queries.data(), 4, {0.1F, 0.0F}, 16);
  ListedStep without(cpu::select_kernels(), *index, head.queries.data(), 4, {0.1F, 0.0F}, 0);
  with.choose();
  without.choose();
  with.attend(head.kv());
  without.attend(head.kv());
  ASSERT_EQ(with.rows.size(), 16U);
  const CodeLists& lists = *index->lists();
  // What is left and the chosen rows by their codes are all.
  for (uint32_t h = 0; h < 4; ++h) {
    std::vector<float> q(64);
    rotate_queries(lists.balance(), head.queries.data() + h * 64, 1, q.data());
    double norm = 0.0;
    for (const float x : q) norm += double{x} * x;
    double sum = std::exp(double{with.coded.lse[h]});
    for (size_t l = 0; l < lists.lists(); ++l) {
      const CodeRunReader run(lists.shape(), lists.run(l));
      for (uint32_t i = 0; i < lists.ids(l).size(); ++i) {
        if (std::find(with.rows.begin(), with.rows.end(), lists.ids(l)[i]) == with.rows.end())
          continue;
        double score = 0.0;
        for (uint32_t j = 0; j < 64; ++j) {
          score += q[j] * (double{run.key_factor(i)} * run.key_level(i, j) + run.key_mean(j));
        }
        const double f = run.key_factor(i);
        sum += std::exp(0.1 * score - 0.5 * 0.01 * norm * f * f * run.noise());
      }
    }
    EXPECT_NEAR(std::log(sum), without.coded.lse[h], 0.02);
  }
}

/// By how much a list stands out, by what it weighs with the whole of its spread above the lightest, for the head for
/// which it does most; below the most that any does.
std::vector<double> depths_of(const ListedStep& step) {
  const CodeLists& lists = *step.search.rows.lists;
  const uint32_t dim = lists.shape().dim;
  std::vector<double> gains(lists.lists(), 0.0);
  double most = 0.0;
  for (uint32_t h = 0; h < step.search.group; ++h) {
    std::vector<float> q(dim);
    rotate_queries(lists.balance(), step.search.queries + size_t{h} * dim, 1, q.data());
    double norm = 0.0;
    for (const float x : q) norm += double{x} * x;
    std::vector<double> hopes(lists.lists());
    for (size_t c = 0; c < lists.chunks(); ++c) {
      for (size_t l = lists.first_list(c); l < lists.first_list(c + 1); ++l) {
        const CodeRunReader run(lists.shape(), lists.run(l));
        double score = 0.0;
        for (uint32_t j = 0; j < dim; ++j) score += double{q[j]} * run.key_mean(j);
        double logit = step.search.logits.scale * score, slope = step.search.logits.scale;
        if (const double cap = step.search.logits.softcap; cap > 0.0) {
          slope *= 1.0 - std::pow(std::tanh(logit / cap), 2);
          logit = cap * std::tanh(logit / cap);
        }
        const double spread = lists.chunk(c).spreads[l - lists.first_list(c)];
        const double t = slope * slope * norm * spread;
        hopes[l] = logit + (t <= 16.0 ? t : 8.0 * std::sqrt(t) - 16.0) +
                   std::log(static_cast<double>(lists.ids(l).size()));
      }
    }
    const auto [low, top] = std::minmax_element(hopes.begin(), hopes.end());
    const double lightest = std::max(*low, *top - 32.0);
    most = std::max(most, *top - lightest);
    for (size_t l = 0; l < hopes.size(); ++l) gains[l] = std::max(gains[l], hopes[l] - lightest);
  }
  for (double& gain : gains) gain = most - gain;
  return gains;
}

TEST(CodeLists, ReadsTheListsOfMostHope) {
  const ListedHead head(6000, 64, 6);
  for (const int read : {1, 5, 20, 60}) {
    const auto index = head.index("codes:k=2,v=2,lists=24,miss=0,read=" + std::to_string(read));
    for (const uint32_t group : {1U, 4U}) {
      for (const float softcap : {0.0F, 6.0F}) {
        SCOPED_TRACE(std::to_string(read) + " of " + std::to_string(group));
        ListedStep step(cpu::select_kernels(), *index, head.queries.data(), group, {0.35F, softcap},
                        0);
        step.choose();
        const auto chosen = step.choice.chosen();
        ASSERT_FALSE(chosen.empty());
        ASSERT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
        size_t rows = 0;
        for (const uint32_t l : chosen) rows += index->lists()->ids(l).size();
        EXPECT_EQ(rows, step.choice.chosen_rows());
        const std::vector<double> depths = depths_of(step);
        double deepest = 0.0, nearest_left = 1e30;
        size_t within = 0;
        for (size_t l = 0; l < depths.size(); ++l) {
          if (std::binary_search(chosen.begin(), chosen.end(), static_cast<uint32_t>(l))) {
            deepest = std::max(deepest, depths[l]);
          } else {
            nearest_left = std::min(nearest_left, depths[l]);
          }
        }
        const double bin = 0.125 + 1e-3;  // a step of the histogram
        EXPECT_LE(deepest, nearest_left + bin);
        for (size_t l = 0; l < depths.size(); ++l) {
          if (depths[l] <= nearest_left + bin) within += index->lists()->ids(l).size();
        }
        const size_t asked = 5888U * static_cast<unsigned>(read) / 100;
        EXPECT_GT(within, asked);  // no more would have been within what was asked
        if (deepest > bin) {
          EXPECT_LE(rows, asked);
        }
      }
    }
  }
}

/// Keys of some models are hundreds long: the variance of a list's logits is in the thousands then.
TEST(CodeLists, LongKeysDoNotDrownTheRest) {
  ListedHead head(6000, 64, 11);
  for (size_t i = 0; i < head.keys.count(); ++i) {
    auto* row = reinterpret_cast<float*>(const_cast<std::byte*>(head.keys.view().row(i)));
    for (uint32_t j = 0; j < 64; ++j) row[j] *= 30.0F;
  }
  const auto index = head.index("codes:k=4,v=4,lists=24,read=30");
  ListedStep step(cpu::select_kernels(), *index, head.queries.data(), 4, {0.125F, 0.0F}, 16);
  step.choose();
  step.attend(head.kv());
  std::vector<uint32_t> all(5888);
  for (uint32_t i = 0; i < 5888; ++i) all[i] = i;
  ListedState truth(4, 64);
  cpu::attend_ids(*step.search.kernels, head.kv(), all, head.queries.data(), 4, {0.125F, 0.0F},
                  truth.view());
  const std::array<StateView, 2> both{step.exact.view(), step.coded.view()};
  cpu::merge_states(both, 4, 64, step.exact.view());
  uint32_t found = 0;
  for (uint32_t h = 0; h < 4; ++h) {
    EXPECT_LT(step.exact.lse[h], truth.lse[h] + 0.1F);
    // One row has nearly all the weight: where it was read, the answer is its value.
    if (step.exact.lse[h] < truth.lse[h] - 0.1F) continue;
    ++found;
    EXPECT_LT(relative_error(&step.exact.o[h * 64], &truth.o[h * 64], 64), 0.1);
  }
  EXPECT_GE(found, 2U);
}

TEST(CodeLists, ReadsAllOfFewRows) {
  const ListGoal goal;
  EXPECT_EQ(goal.rows(3000), 3000U);
  EXPECT_EQ(goal.rows(40000), 8192U);
  EXPECT_EQ(goal.rows(1000000), 120000U);
}

TEST(CodeLists, TheOrderOfPartsChangesNoBit) {
  const ListedHead head(9000, 64, 7);
  const auto index = head.index("codes:k=2,v=2,lists=16,read=50");
  ASSERT_GT(CodedRows::of(*index).parts(), 1U);
  ListedStep one(cpu::select_kernels(), *index, head.queries.data(), 4, {0.35F, 0.0F}, 16);
  ListedStep other(cpu::select_kernels(), *index, head.queries.data(), 4, {0.35F, 0.0F}, 16);
  one.choose();
  other.choose();
  one.attend(head.kv());
  other.attend(head.kv(), true);
  EXPECT_EQ(one.rows, other.rows);
  EXPECT_EQ(one.coded.o, other.coded.o);
  EXPECT_EQ(one.coded.lse, other.coded.lse);
}

/// Every row below count() is in one list, and each list's codes are those of its rows.
void expect_sound(const CodeLists& lists, const KvView& kv) {
  std::vector<uint32_t> seen(lists.count(), 0);
  ASSERT_LE(lists.count(), kv.keys.tokens);
  ASSERT_EQ(lists.first_list(lists.chunks()), lists.lists());
  for (size_t l = 0; l < lists.lists(); ++l) {
    const CodeRun run = lists.run(l);
    const auto ids = lists.ids(l);
    ASSERT_EQ(run.rows, ids.size());
    ASSERT_GE(ids.size(), 1U);
    ASSERT_LE(ids.size(), kCodeBlock);
    for (const uint32_t id : ids) ++seen.at(id);
    if (l % 7 != 0) continue;
    const CodeShape& shape = lists.shape();
    std::vector<std::byte> fresh(run.tiles() * CodeLists::tile_bytes(shape) + 4 * shape.dim);
    CodeRunOf<std::byte> out;
    out.keys = fresh.data();
    out.values = out.keys + size_t{run.tiles()} * kCodeLanes * shape.key_words() * 4;
    out.factors = out.values + size_t{run.tiles()} * kCodeLanes * shape.value_words() * 4;
    out.key_mean = out.factors + size_t{run.tiles()} * kCodeTile * 4;
    out.value_mean = out.key_mean + size_t{shape.dim} * 2;
    const CodeRunFigures figures =
        encode_rows(shape, lists.balance(), *context().kernels, kv, ids, out);
    ASSERT_EQ(figures.noise, run.noise);
    ASSERT_EQ(std::memcmp(run.keys, out.keys, lists.list_bytes(l)), 0);
    ASSERT_EQ(std::memcmp(run.key_mean, out.key_mean, shape.dim * 2), 0);
    ASSERT_EQ(std::memcmp(run.value_mean, out.value_mean, shape.dim * 2), 0);
  }
  for (const uint32_t n : seen) ASSERT_EQ(n, 1U);
}

/// Rows of the first lists whose codes are the same memory in both.
size_t rows_at_the_same_place(const CodeLists& a, const CodeLists& b) {
  size_t rows = 0;
  for (size_t l = 0; l < std::min(a.lists(), b.lists()); ++l) {
    if (a.run(l).keys != b.run(l).keys) break;
    rows += a.ids(l).size();
  }
  return rows;
}

TEST(CodeLists, HoldEveryRowOnceAfterAnyOperation) {
  constexpr const char* kSpec = "codes:k=2,v=1,lists=20";
  for (uint32_t seed = 0; seed < cases(6); ++seed) {
    std::mt19937 random(seed);
    Keys keys(5000, 64, key_dtypes()[seed % 3]), values(5000, 64, key_dtypes()[seed % 3]);
    const auto grow = [&](size_t n) {
      n = std::min(n, 5000 - keys.count());
      keys.put(keys.count(), attention_keys(n, 64, random));
      values.put(values.count(), gaussian(n, 64, random));
    };
    const auto kv = [&] { return KvView{keys.view(), values.view()}; };
    auto index = make_index(kSpec, 64, keys.dtype(), context());
    std::unique_ptr<Index> parent;
    std::string parent_saved;
    for (int i = 0; i < 24; ++i) {
      const uint32_t kind = i == 0 ? 0 : random() % 7;
      SCOPED_TRACE("seed " + std::to_string(seed) + " operation " + std::to_string(i));
      if (kind == 0) {
        if (i == 0) grow(900);
        BuildInput in;
        in.keys = keys.view();
        in.values = values.view();
        if (keys.count() != 0) index->build(in, {});
      } else if (kind < 4) {
        grow(random() % 700);
        index->append_kv(kv(), {});
        // All complete blocks have codes again.
        if (index->lists() != nullptr && keys.count() / 256 * 256 > index->lists()->count()) {
          ADD_FAILURE() << keys.count() << " rows, in lists " << index->lists()->count();
        }
      } else if (kind == 4) {
        const size_t n = random() % (keys.count() + 1);
        keys.poison(n);
        values.poison(n);
        index->truncate(n);
      } else if (kind == 5) {
        std::stringstream bytes(saved_bytes(*index));
        index = make_index(kSpec, 64, keys.dtype(), context());
        index->load(bytes, keys.view());
      } else {
        parent = std::move(index);
        parent_saved = saved_bytes(*parent);
        index = parent->share(keys.view());
      }
      ASSERT_EQ(index->codes(), nullptr);
      ASSERT_EQ(parent == nullptr ? "" : saved_bytes(*parent), parent_saved);
      if (index->lists() == nullptr) continue;
      ASSERT_EQ(index->lists()->count() % 256, 0U);
      ASSERT_NO_FATAL_FAILURE(expect_sound(*index->lists(), kv()));
      if (parent != nullptr && parent->lists() != nullptr) {
        const size_t common = index->lists()->common_rows(*parent->lists());
        ASSERT_EQ(common, rows_at_the_same_place(*index->lists(), *parent->lists()));
        ASSERT_TRUE(kind != 6 || common == index->lists()->count());
      }
      if (keys.count() == 0) continue;
      const size_t estimate =
          estimate_codes(Spec::parse(kSpec, {{&kCodesType}}), keys.count(), 64, keys.dtype());
      EXPECT_LT(index->bytes(), estimate * 3 / 2 + 4096);
    }
  }
}

TEST(CodeLists, ChunksDoubleUntilTheyAreASegment) {
  std::mt19937 random(9);
  Keys keys(40 * 256, 64, DType::f16), values(40 * 256, 64, DType::f16);
  auto index = make_index("codes:k=2,v=2,lists=64", 64, DType::f16, context());
  size_t clustered = 0;
  for (int i = 0; i < 40; ++i) {
    keys.put(keys.count(), attention_keys(256, 64, random));
    values.put(values.count(), gaussian(256, 64, random));
    index->append_kv({keys.view(), values.view()}, {});
    const CodeLists& lists = *index->lists();
    clustered += lists.chunk(lists.chunks() - 1).rows;
    ASSERT_EQ(lists.count(), keys.count());
    // One chunk for every 1 in the number of blocks.
    EXPECT_EQ(lists.chunks(), static_cast<size_t>(std::popcount(static_cast<unsigned>(i + 1))));
  }
  EXPECT_LE(clustered, 6U * 40 * 256);
}

}  // namespace
}  // namespace keyhole::index::test
