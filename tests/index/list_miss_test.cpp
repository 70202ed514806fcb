// How many lists of codes a step reads beyond its share of the rows: as many as the weights and mean values of the
// others, summed in double, demand.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/attention.h"
#include "cpu/attention_state.h"
#include "index/scan/code_lists.h"
#include "index/scan/list_choice.h"
#include "tests/index/keys.h"
#include "tests/index/listed_heads.h"
#include "tests/relative_error.h"

namespace keyhole::index::test {
namespace {

using keyhole::test::raise;
using keyhole::test::relative_error;

constexpr double kLittleLeft = 1.0 / 64.0;
constexpr double kHopeStep = 1.0 / 32.0;
constexpr const char* kSpec = "codes:k=2,v=2,lists=24,read=10";

/// What lists say of one head, in double.
struct HeadOfLists {
  std::vector<double> weights, hopes;  // [lists]; weights sum up to 1
  double length = 0.0;  // of the output by mean values, as a share of that of a value's deviation

  [[nodiscard]] double left(std::span<const uint32_t> chosen) const {
    double sum = 0.0;
    for (uint32_t l = 0; l < weights.size(); ++l) {
      if (!std::binary_search(chosen.begin(), chosen.end(), l)) sum += weights[l];
    }
    return sum;
  }
  [[nodiscard]] double allowed(double miss) const { return std::max(miss * length, kLittleLeft); }
};

HeadOfLists head_of(const ListedStep& step, uint32_t head) {
  const CodeSearch& s = step.search;
  const CodeLists& lists = *s.rows.lists;
  const uint32_t dim = s.shape().dim;
  std::vector<float> q(dim);
  rotate_queries(lists.balance(), s.queries + size_t{head} * dim, 1, q.data());
  double norm = 0.0;
  for (const float x : q) norm += double{x} * x;
  std::vector<double> logits, variances, sizes;
  for (size_t c = 0; c < lists.chunks(); ++c) {
    for (size_t l = lists.first_list(c); l < lists.first_list(c + 1); ++l) {
      const CodeRunReader run(s.shape(), lists.run(l));
      double score = 0.0;
      for (uint32_t j = 0; j < dim; ++j) score += double{q[j]} * run.key_mean(j);
      double logit = s.logits.scale * score, slope = s.logits.scale;
      if (const double cap = s.logits.softcap; cap > 0.0) {
        slope *= 1.0 - std::pow(std::tanh(logit / cap), 2);
        logit = cap * std::tanh(logit / cap);
      }
      logits.push_back(logit);
      variances.push_back(slope * slope * norm * lists.chunk(c).spreads[l - lists.first_list(c)]);
      sizes.push_back(static_cast<double>(lists.ids(l).size()));
    }
  }
  HeadOfLists out;
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  std::vector<double> o(dim, 0.0);
  for (size_t l = 0; l < lists.lists(); ++l) {
    const double t = variances[l], many = std::log(sizes[l]);
    const double above = t <= 2.0 * many ? 0.5 * t : std::sqrt(2.0 * t * many) - many;
    const double weight = sizes[l] * std::exp(std::min(logits[l] + above, top) - top);
    out.weights.push_back(weight);
    out.hopes.push_back(many + logits[l] + (t <= 16.0 ? t : 8.0 * std::sqrt(t) - 16.0));
    sum += weight;
    const CodeRunReader run(s.shape(), lists.run(l));
    for (uint32_t j = 0; j < dim; ++j) o[j] += weight * run.value_mean(j);
  }
  double square = 0.0;
  for (const double x : o) square += x * x / (sum * sum) / dim;
  out.length = std::sqrt(square);
  for (double& w : out.weights) w /= sum;
  return out;
}

/// A step that reads a tenth of the rows, and what `miss` asks for.
ListedStep chosen_step(const Index& index, const float* queries, uint32_t group,
                       const LogitParams& logits, float miss) {
  ListedStep step(cpu::select_kernels(), index, queries, group, logits, 0);
  step.search.rows.goal.miss = miss;
  step.choose();
  return step;
}

std::vector<uint32_t> chosen_of(const ListedStep& step) {
  return {step.choice.chosen().begin(), step.choice.chosen().end()};
}

TEST(CodeListsMiss, TheSpecSaysHowMuch) {
  const ListedHead head(512, 64, 1);
  EXPECT_FLOAT_EQ(head.index("codes:lists=16")->list_goal().miss, 0.7F);
  EXPECT_FLOAT_EQ(head.index("codes:lists=16,miss=35")->list_goal().miss, 0.35F);
  EXPECT_EQ(head.index("codes:lists=16,miss=0")->list_goal().miss, 0.0F);
}

TEST(CodeListsMiss, WhatIsLeftIsWithinTheLimitOrAllIsRead) {
  std::random_device seed;
  uint32_t number = seed();
  SCOPED_TRACE("seed " + std::to_string(number));
  uint32_t more = 0, less_than_all = 0, untouched = 0;
  for (const uint32_t dim : {64U, 128U}) {
    const ListedHead head(5000, dim, number);
    const auto index = head.index(kSpec);
    for (const float miss : {0.2F, 0.7F, 1000.0F}) {
      for (const float scale : {0.02F, 0.1F, 0.5F, 2.0F}) {
        for (const float softcap : {0.0F, 6.0F}) {
          const uint32_t group = 1 + ++number % 4;
          SCOPED_TRACE("d " + std::to_string(dim) + " miss " + std::to_string(miss) + " scale " +
                       std::to_string(scale) + " soft-cap " + std::to_string(softcap));
          const LogitParams logits{scale, softcap};
          const float* q = head.queries.data();
          const ListedStep step = chosen_step(*index, q, group, logits, miss);
          const std::vector<uint32_t> now = chosen_of(step);
          const std::vector<uint32_t> first = chosen_of(chosen_step(*index, q, group, logits, 0));
          ASSERT_TRUE(std::is_sorted(now.begin(), now.end()));
          EXPECT_TRUE(std::includes(now.begin(), now.end(), first.begin(), first.end()));
          size_t rows = 0;
          for (const uint32_t l : now) rows += index->lists()->ids(l).size();
          EXPECT_EQ(rows, step.choice.chosen_rows());
          bool any_lacks = false;
          for (uint32_t h = 0; h < group; ++h) {
            const HeadOfLists of(head_of(step, h));
            const double allowed = of.allowed(miss);
            EXPECT_LE(of.left(now), allowed * 1.01 + 1e-4) << h;
            any_lacks = any_lacks || of.left(first) > allowed * 0.99 - 1e-4;
          }
          if (!any_lacks) {
            EXPECT_EQ(now, first);
          }
          untouched += now == first ? 1 : 0;
          more += now != first ? 1 : 0;
          less_than_all += now != first && now.size() < index->lists()->lists() ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(more, 2U);
  EXPECT_GT(less_than_all, 2U);
  EXPECT_GT(untouched, 0U);
}

TEST(CodeListsMiss, ReadsNoMoreThanIsNeededAndTheListsOfMostHopeFirst) {
  uint32_t checked = 0;
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    const ListedHead head(5000, 64, seed);
    const auto index = head.index(kSpec);
    for (const float scale : {0.05F, 0.15F}) {
      const LogitParams logits{scale, 0.0F};
      const float* q = head.queries.data();
      const ListedStep step = chosen_step(*index, q, 1, logits, 0.7F);
      const std::vector<uint32_t> now = chosen_of(step);
      const std::vector<uint32_t> first = chosen_of(chosen_step(*index, q, 1, logits, 0.0F));
      if (now == first) continue;
      ++checked;
      const HeadOfLists of(head_of(step, 0));
      double least = 1e30, most_left = -1e30;
      const auto was_added = [&](uint32_t l) {
        return std::binary_search(now.begin(), now.end(), l) &&
               !std::binary_search(first.begin(), first.end(), l);
      };
      for (uint32_t l = 0; l < of.hopes.size(); ++l) {
        if (!std::binary_search(now.begin(), now.end(), l)) {
          most_left = std::max(most_left, of.hopes[l]);
        } else if (was_added(l)) {
          least = std::min(least, of.hopes[l]);
        }
      }
      EXPECT_GE(least, most_left - kHopeStep - 1e-3);
      // Those of least hope that were added are too many to leave.
      double left = of.left(now);
      for (uint32_t l = 0; l < of.hopes.size(); ++l) {
        if (was_added(l) && of.hopes[l] <= least + kHopeStep + 1e-3) left += of.weights[l];
      }
      EXPECT_GT(left, of.allowed(0.7) * 0.99);
    }
  }
  EXPECT_GT(checked, 2U);
}

/// Values that share a mean make long outputs, of which light rows are a small part; values that cancel do not.
TEST(CodeListsMiss, TheLengthOfTheOutputDecides) {
  size_t rows[2];
  for (const bool shared : {false, true}) {
    ListedHead head(5000, 64, 3);
    if (shared) {
      std::vector<float> values = gaussian(5000, 64, head.random);
      for (float& v : values) v += 3.0F;
      head.values.put(0, values);
    }
    const auto index = head.index(kSpec);
    const float* q = head.queries.data();
    const ListedStep step = chosen_step(*index, q, 2, {0.02F, 0.0F}, 0.7F);
    rows[shared ? 1 : 0] = step.choice.chosen_rows();
  }
  EXPECT_GT(rows[0], 2400U);
  EXPECT_LE(rows[1], 486U);
}

TEST(CodeListsMiss, SharpHeadsReadWhatTheyAreTold) {
  uint32_t sharp = 0;
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    const ListedHead head(5000, 64, seed);
    const auto index = head.index(kSpec);
    for (size_t first_row = seed; first_row < 3000; first_row += 1000) {
      // Queries along keys: the heads look at what is near these.
      std::vector<float> queries(2 * 64);
      for (uint32_t h = 0; h < 2; ++h) {
        context().kernels->to_f32[static_cast<size_t>(DType::f32)](
            head.keys.view().row(500 * h + first_row), queries.data() + size_t{h} * 64, 64);
      }
      const LogitParams logits{0.2F, 0.0F};
      const ListedStep step = chosen_step(*index, queries.data(), 2, logits, 0.7F);
      const std::vector<uint32_t> first =
          chosen_of(chosen_step(*index, queries.data(), 2, logits, 0.0F));
      bool is_sharp = true;
      for (uint32_t h = 0; h < 2; ++h) {
        is_sharp = is_sharp && head_of(step, h).left(first) < kLittleLeft;
      }
      if (!is_sharp) continue;
      ++sharp;
      EXPECT_EQ(chosen_of(step), first) << seed;
    }
  }
  EXPECT_GT(sharp, 3U);
}

/// Where all rows weigh something and values go with keys, the mean value of a list is not that of its rows that weigh.
TEST(CodeListsMiss, HeadsThatLookAtEverythingAreWithinTheLimit) {
  std::array<double, 2> worst{};
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    ListedHead head(5000, 64, seed);
    std::mt19937 random(seed);
    const std::vector<float> keys = gaussian(5000, 64, random);
    std::vector<float> values = gaussian(5000, 64, random);
    const std::vector<float> queries = gaussian(2, 64, random);
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.5F * values[i] + keys[i];
    head.keys.put(0, keys);
    head.values.put(0, values);
    const LogitParams logits{0.125F, 0.0F};
    std::vector<uint32_t> all(4864);
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    ListedState truth(2, 64);
    cpu::attend_ids(cpu::select_kernels(), head.kv(), all, queries.data(), 2, logits, truth.view());
    const auto index = head.index("codes:k=4,v=4,lists=24,read=10");
    for (const float miss : {0.0F, 0.7F}) {
      ListedStep step(cpu::select_kernels(), *index, queries.data(), 2, logits, 16);
      step.search.rows.goal.miss = miss;
      step.choose();
      step.attend(head.kv());
      const std::array<StateView, 2> both{step.exact.view(), step.coded.view()};
      cpu::merge_states(both, 2, 64, step.exact.view());
      for (uint32_t h = 0; h < 2; ++h) {
        raise(worst[miss == 0.0F ? 0 : 1],
              relative_error(&step.exact.o[h * 64], &truth.o[h * 64], 64));
      }
    }
  }
  EXPECT_GT(worst[0], 0.3);
  EXPECT_TRUE(std::isfinite(worst[0]));
  EXPECT_LT(worst[1], 0.15);
}

}  // namespace
}  // namespace keyhole::index::test
