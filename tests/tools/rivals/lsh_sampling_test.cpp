// lsh: probabilities are those of the definition, and with them sums over samples estimate sums over all keys.
#include "tools/rivals/lsh_sampling.h"

#include <gtest/gtest.h>

#include <numbers>

#include "tests/sanitized.h"
#include "tests/tools/rivals/rival_case.h"

namespace keyhole::tools {
namespace {

TEST(LshSampling, ProbabilitiesAreBinomialTails) {
  for (const size_t tables : {2, 3, 10, 150}) {
    for (const size_t bits : {1, 4, 10, 16}) {
      for (double cosine = -1; cosine <= 1; cosine += 0.05) {
        const long double u =
            1 - std::acos(static_cast<long double>(std::clamp(cosine, -1.0, 1.0))) /
                    std::numbers::pi_v<long double>;
        const long double a = std::pow(u, static_cast<long double>(bits));
        // Sum over two collisions and more, each term positive: no digits are lost.
        long double term = std::pow(1 - a, static_cast<long double>(tables));
        long double expected = 0;
        if (a >= 1) {
          expected = 1;
        } else {
          for (size_t i = 1; i <= tables; ++i) {
            term *= a / (1 - a) * static_cast<long double>(tables - i + 1) /
                    static_cast<long double>(i);
            if (i >= 2) expected += term;
          }
        }
        const auto wanted = static_cast<double>(expected);
        EXPECT_NEAR(lsh_probability(cosine, bits, tables), wanted, 1e-6 * wanted + 1e-300)
            << tables << " tables, " << bits << " bits, cosine " << cosine;
      }
    }
  }
}

// Mean and standard error of samples.
struct Estimate {
  double sum = 0, squares = 0;
  size_t n = 0;

  void add(double x) {
    sum += x;
    squares += x * x;
    ++n;
  }
  [[nodiscard]] double mean() const { return sum / static_cast<double>(n); }
  [[nodiscard]] double standard_error() const {
    const double variance = squares / static_cast<double>(n) - mean() * mean();
    return std::sqrt(std::max(variance, 0.0) / static_cast<double>(n));
  }
};

TEST(LshSampling, SumsOverTheSampleAreUnbiased) {
  std::mt19937 random(11);
  RivalCase on(random, 40, 8, 2, 1);
  on.rule.scale = 0.1F;  // no key may carry so much that the estimate's own error hides a bias
  const size_t seeds = test::unless_sanitized(3000, 600);
  Estimate weights[2];
  std::vector<Estimate> values(16);
  for (size_t seed = 0; seed < seeds; ++seed) {
    const auto rival = build_rival(on, "lsh:tables=6,bits=2,seed=" + std::to_string(seed));
    RivalStep step(*rival, on.stored, on.shape, on.rule, 1);
    step.run(on.query(0));
    for (size_t j = 0; j < 2; ++j) {
      const double sum = std::exp(double{step.lse[j]});  // 0 where nothing was sampled
      weights[j].add(sum);
      for (size_t c = 0; c < 8; ++c) values[j * 8 + c].add(sum * step.o[j * 8 + c]);
    }
  }
  for (size_t j = 0; j < 2; ++j) {
    const RivalCase::Sums truth = on.sums(j);
    // Five standard errors: once in two million runs, were the seeds not fixed. And they must be small enough to tell.
    EXPECT_NEAR(weights[j].mean(), truth.weights, 5 * weights[j].standard_error());
    EXPECT_LT(weights[j].standard_error(), 0.03 * truth.weights);
    for (size_t c = 0; c < 8; ++c) {
      EXPECT_NEAR(values[j * 8 + c].mean(), truth.values[c],
                  5 * values[j * 8 + c].standard_error());
    }
  }
}

TEST(LshSampling, SamplesWhatCollidesInTwoTables) {
  std::mt19937 random(13);
  const RivalCase on(random, 300, 16, 1, 4);
  // A key in the direction of the query from the mean of all keys shares all of its buckets; the opposite shares none.
  std::vector<double> mean(16);
  for (size_t i = 0; i < on.keys.size(); ++i) mean[i % 16] += on.keys[i] / 300.0;
  const auto rival = build_rival(on, "lsh:tables=40,bits=6");
  double sampled_cosine = 0;
  double all_cosine = 0;
  size_t sampled = 0;
  for (size_t step = 0; step < 4; ++step) {
    RivalAnswer answer;
    answer.reset(1);
    rival->search(on.query(step), 1, 0, answer);
    EXPECT_TRUE(answer.own_rows);
    ASSERT_EQ(answer.heads[0].rows.size(), answer.heads[0].log_weights.size());
    std::vector<double> cosines;
    for (size_t row = 0; row < 300; ++row) {
      double dot = 0;
      double key = 0;
      double query = 0;
      for (size_t c = 0; c < 16; ++c) {
        const double centred = on.keys[row * 16 + c] - mean[c];
        dot += centred * on.query(step)[c];
        key += centred * centred;
        query += double{on.query(step)[c]} * on.query(step)[c];
      }
      cosines.push_back(dot / std::sqrt(key * query));
      all_cosine += cosines.back() / 1200;
    }
    std::set<uint32_t> once;
    for (size_t i = 0; i < answer.heads[0].rows.size(); ++i) {
      const uint32_t row = answer.heads[0].rows[i];
      EXPECT_TRUE(once.insert(row).second) << row;
      sampled_cosine += cosines[row];
      ++sampled;
      EXPECT_NEAR(answer.heads[0].log_weights[i], -std::log(lsh_probability(cosines[row], 6, 40)),
                  1e-3);
    }
  }
  ASSERT_GT(sampled, 0U);
  EXPECT_GT(sampled_cosine / static_cast<double>(sampled), all_cosine + 0.1);

  // The same step again gives the same: nothing is left of the one before.
  RivalAnswer first;
  RivalAnswer second;
  for (RivalAnswer* answer : {&first, &second}) {
    answer->reset(1);
    rival->search(on.query(0), 1, 0, *answer);
  }
  EXPECT_EQ(first.heads[0].rows, second.heads[0].rows);
}

}  // namespace
}  // namespace keyhole::tools
