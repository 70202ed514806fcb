// Filters against an independent computation of the distribution, draws against its probabilities.
#include "tools/generation/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "tests/normal.h"
#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

std::vector<float> random_logits(size_t count, uint64_t seed, double spread = 3.0) {
  std::mt19937_64 random(seed);
  keyhole::test::Normal<float> normal(0.0F, static_cast<float>(spread));
  std::vector<float> logits(count);
  for (float& x : logits) x = normal(random);
  return logits;
}

/// Probabilities by token: full sorts in long double, one filter after another, each on renormalised numbers.
std::map<uint32_t, double> reference(const std::vector<float>& logits,
                                     const SamplingOptions& options,
                                     const std::vector<uint32_t>& seen = {}) {
  std::vector<std::pair<long double, uint32_t>>
      rows;  // (-logit, token): sorts the best to the front
  for (uint32_t i = 0; i < logits.size(); ++i) {
    long double x = logits[i];
    if (std::find(seen.begin(), seen.end(), i) != seen.end()) {
      const auto penalty = static_cast<float>(options.repetition_penalty);
      x = x > 0 ? logits[i] / penalty : logits[i] * penalty;
    }
    rows.emplace_back(-x / static_cast<long double>(options.temperature), i);
  }
  std::sort(rows.begin(), rows.end());
  if (options.top_k != 0 && options.top_k < rows.size()) rows.resize(options.top_k);
  const auto softmax = [&rows] {
    std::vector<long double> p;
    long double sum = 0;
    for (const auto& row : rows) sum += std::exp(rows.front().first - row.first);
    for (const auto& row : rows) p.push_back(std::exp(rows.front().first - row.first) / sum);
    return p;
  };
  {
    const auto p = softmax();
    long double before = 0;
    size_t kept = 0;
    while (kept < p.size() && before < static_cast<long double>(options.top_p)) before += p[kept++];
    if (options.top_p < 1.0) rows.resize(kept);
  }
  {
    const auto p = softmax();
    size_t kept = 0;
    while (kept < p.size() && p[kept] >= p[0] * static_cast<long double>(options.min_p)) ++kept;
    rows.resize(kept);
  }
  std::map<uint32_t, double> out;
  const auto p = softmax();
  for (size_t i = 0; i < rows.size(); ++i) out[rows[i].second] = static_cast<double>(p[i]);
  return out;
}

void expect_distribution(const std::vector<float>& logits, const SamplingOptions& options,
                         const std::vector<uint32_t>& seen = {}) {
  const auto expected = reference(logits, options, seen);
  Sampler sampler(options);
  sampler.saw(seen);
  const auto got = sampler.candidates(logits);
  ASSERT_EQ(got.size(), expected.size()) << options.text();
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(expected.count(got[i].token), 1U) << options.text() << ", token " << got[i].token;
    EXPECT_NEAR(got[i].probability, expected.at(got[i].token), 1e-12) << options.text();
    if (i == 0) continue;
    EXPECT_LE(got[i].probability, got[i - 1].probability) << options.text();
  }
}

TEST(Sampler, FiltersAsTheReferenceDoes) {
  const std::vector<float> logits = random_logits(1000, 5);
  for (const double temperature : {0.3, 1.0, 2.5}) {
    for (const uint32_t k : {0U, 1U, 7U, 40U, 5000U}) {
      for (const double p : {1.0, 0.9, 0.5, 1e-9}) {
        for (const double min : {0.0, 0.05, 1.0}) {
          expect_distribution(logits, {1.0, temperature, k, p, min, 1});
        }
      }
    }
  }
}

TEST(Sampler, ThePenaltyTakesFromWhatTheContextHolds) {
  const std::vector<float> logits = random_logits(200, 6);
  const std::vector<uint32_t> seen = {0, 3, 3, 17, 199, 4000};
  expect_distribution(logits, {1.3, 0.8, 0, 1.0, 0.0, 1}, seen);
  expect_distribution(logits, {0.7, 1.0, 20, 0.95, 0.0, 1}, seen);

  Sampler greedy({5.0, 0.0, 0, 1.0, 0.0, 1});
  const std::vector<float> three = {1.0F, 4.0F, -2.0F};
  EXPECT_EQ(greedy.next(three), 1U);
  greedy.saw(std::vector<uint32_t>{1});
  EXPECT_EQ(greedy.next(three), 0U);  // 4 / 5 is below 1
  greedy.forget();
  EXPECT_EQ(greedy.next(three), 1U);
}

TEST(Sampler, DrawsAsOftenAsTheProbabilitiesSay) {
  const std::vector<float> logits = random_logits(50, 7, 1.0);
  const SamplingOptions options{1.0, 0.9, 12, 0.95, 0.02, 77};
  const auto expected = reference(logits, options);
  Sampler sampler(options);
  constexpr int kDraws = 40000;
  std::map<uint32_t, int> counts;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.next(logits)];
  for (const auto& [token, count] : counts) ASSERT_EQ(expected.count(token), 1U) << token;
  for (const auto& [token, p] : expected) {
    // Five standard deviations of a binomial: passes for all but one seed in 100,000.
    EXPECT_NEAR(counts[token], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << token;
  }
}

TEST(Sampler, TheSeedAloneDecidesWhatIsDrawn) {
  std::vector<float> logits(8);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i) * 0.25F;
  const auto draw = [&logits](uint64_t seed) {
    Sampler sampler({1.0, 1.0, 0, 1.0, 0.0, seed});
    std::vector<uint32_t> tokens;
    for (int i = 0; i < 12; ++i) tokens.push_back(sampler.next(logits));
    return tokens;
  };
  // 53 upper bits of std::mt19937_64's outputs over 2^53, as the standard fixes them, on the sum of exp(i / 4).
  const auto by_hand = [&logits](uint64_t seed) {
    std::mt19937_64 bits(seed);
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(double{x});
    std::vector<uint32_t> tokens;
    for (int i = 0; i < 12; ++i) {
      const double at = std::ldexp(static_cast<double>(bits() >> 11U), -53) * sum;
      double before = 0.0;
      uint32_t token = 0;
      while (before + std::exp(double{logits[token]}) <= at)
        before += std::exp(double{logits[token++]});
      tokens.push_back(token);
    }
    return tokens;
  };
  for (const uint64_t seed : {1U, 2U, 99U}) EXPECT_EQ(draw(seed), by_hand(seed)) << seed;
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
}

TEST(Sampler, GreedyTakesTheFirstOfTheLargest) {
  Sampler sampler({});
  EXPECT_EQ(sampler.next(std::vector<float>{1.0F, 3.0F, 3.0F, -1.0F}), 1U);
  const float low = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(sampler.next(std::vector<float>{low, low, -5.0F}), 2U);
  EXPECT_EQ(sampler.next(std::vector<float>{low, -0.0F, 0.0F, -1e-40F}), 1U);
  EXPECT_EQ(sampler.next(std::vector<float>{-3.0F, -2.0F, -2.5F}), 1U);
  EXPECT_EQ(sampler.next(std::vector<float>{-1e-40F, 1e-40F, 3e38F, -3e38F}), 2U);
}

TEST(Sampler, TokensOfMinusInfinityNeverCome) {
  const float low = -std::numeric_limits<float>::infinity();
  Sampler sampler({1.0, 2.0, 0, 1.0, 0.0, 3});
  for (int i = 0; i < 100; ++i) EXPECT_NE(sampler.next(std::vector<float>{0.0F, low, 0.0F}), 1U);
}

TEST(Sampler, ATinyTemperatureIsGreedy) {
  const std::vector<float> logits = random_logits(1000, 8);
  for (const double temperature : {1e-6, 1e-300, 5e-324}) {
    Sampler sampler({1.0, temperature, 0, 1.0, 0.0, 4});
    EXPECT_EQ(sampler.next(logits), Sampler({}).next(logits)) << temperature;
  }
}

TEST(Sampler, RefusesLogitsThatAreNoNumbers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float high = std::numeric_limits<float>::infinity();
  for (const double temperature : {0.0, 1.0}) {
    Sampler sampler({1.0, temperature, 0, 1.0, 0.0, 1});
    EXPECT_NE(error_of([&] {
                (void)sampler.next(std::vector<float>{0.0F, nan, nan});
              }).find("token 1 is nan"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                (void)sampler.next(std::vector<float>{0.0F, 1.0F, high});
              }).find("token 2 is inf"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                (void)sampler.next(std::vector<float>{-high, -high});
              }).find("all 2 tokens are -inf"),
              std::string::npos);
    EXPECT_NE(error_of([&] { (void)sampler.next({}); }), "");
  }
}

TEST(Sampler, GoesOnBehindWhatAnotherDrew) {
  const std::vector<float> logits = random_logits(50, 3);
  const SamplingOptions options{1.0, 0.9, 0, 1.0, 0.0, 7};
  Sampler whole(options), first(options), second(options), other({1.0, 0.9, 0, 1.0, 0.0, 8}),
      other_fresh({1.0, 0.9, 0, 1.0, 0.0, 8});
  std::vector<uint32_t> tokens;
  for (int i = 0; i < 40; ++i) tokens.push_back(whole.next(logits));
  for (int i = 0; i < 15; ++i) EXPECT_EQ(first.next(logits), tokens[i]);
  second.go_on(first.state());
  other.go_on(first.state());
  bool differs = false;
  for (int i = 15; i < 40; ++i) {
    EXPECT_EQ(second.next(logits), tokens[i]);
    const uint32_t token = other.next(logits);
    EXPECT_EQ(token, other_fresh.next(logits)) << "another seed begins anew";
    differs = differs || token != tokens[i - 15];
  }
  EXPECT_TRUE(differs);
  EXPECT_EQ(second.state().draws, 40U);
}

TEST(SamplingOptions, RefuseWhatMeansNothing) {
  const double nan = std::nan("");
  EXPECT_EQ(refusal(SamplingOptions{}), "");
  EXPECT_EQ(refusal({1.1, 0.8, 40, 0.9, 0.05, 1}), "");
  EXPECT_EQ(refusal({1.0, -1.0, 0, 1.0, 0.0, 1}).rfind("temperature is -1, allowed", 0), 0U);
  EXPECT_NE(refusal({1.0, nan, 0, 1.0, 0.0, 1}), "");
  EXPECT_NE(refusal({0.0, 1.0, 0, 1.0, 0.0, 1}), "");
  for (const double p : {0.0, 1.5, nan}) EXPECT_NE(refusal({1.0, 1.0, 0, p, 0.0, 1}), "") << p;
  for (const double p : {-0.1, 1.5, nan}) EXPECT_NE(refusal({1.0, 1.0, 0, 1.0, p, 1}), "") << p;
}

TEST(SamplingOptions, SayWhatIsInEffect) {
  EXPECT_EQ(SamplingOptions{}.text(), "greedy");
  EXPECT_EQ((SamplingOptions{1.0, 0.8, 40, 0.95, 0.05, 7}.text()),
            "temperature 0.8, top-k 40, top-p 0.95, min-p 0.05, seed 7");
}

}  // namespace
}  // namespace keyhole::tools
