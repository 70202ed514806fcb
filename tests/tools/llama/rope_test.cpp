// RoPE: frequencies against the published formulas, rotation against complex multiplication.
#include "tools/llama/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <random>

#include "tests/normal.h"
#include "tests/tools/llama/synthetic_model.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

json llama31_config() {
  json config = testing::small_config();
  config["head_dim"] = 128;
  config["rope_theta"] = 500000.0;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  return config;
}

Rope rope_of(const json& config) { return Rope(parse_llama_config(config.dump(), "config.json")); }

TEST(Rope, FrequenciesFollowTheFormulaOfEveryScaling) {
  json linear = testing::small_config();
  linear["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 4.0}};
  json yarn = testing::small_config();
  yarn["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 4096}};
  for (const json& config : {testing::small_config(), linear, llama31_config(), yarn}) {
    const Rope rope = rope_of(config);
    ASSERT_EQ(rope.frequencies().size(), config["head_dim"].get<size_t>() / 2);
    for (size_t i = 0; i < rope.frequencies().size(); ++i) {
      const double expected = testing::reference_frequency(config, i);
      EXPECT_NEAR(rope.frequencies()[i], expected, 1e-12 * expected) << config << " pair " << i;
    }
  }
}

TEST(Rope, Llama3KeepsFastPairsAndSlowsSlowOnes) {
  json plain = llama31_config();
  plain.erase("rope_scaling");
  const auto scaled = rope_of(llama31_config()).frequencies();
  const auto unscaled = rope_of(plain).frequencies();
  EXPECT_DOUBLE_EQ(scaled.front(), unscaled.front());
  EXPECT_DOUBLE_EQ(scaled.back(), unscaled.back() / 8.0);
  size_t between = 0;
  for (size_t i = 0; i < scaled.size(); ++i) {
    if (scaled[i] < unscaled[i] && scaled[i] > unscaled[i] / 8.0) ++between;
  }
  // Wavelengths from 2048 to 8192 tokens: log(4) / log(500000) of 64 pairs, rounded down here.
  EXPECT_EQ(between, 6U);
}

TEST(Rope, YarnMultipliesByItsFactor) {
  json config = testing::small_config();
  config["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 4096}};
  const Rope rope = rope_of(config);
  std::vector<float> cosines(32), sines(32);
  rope.angles(1000, cosines.data(), sines.data());
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(std::hypot(cosines[i], sines[i]), 0.1 * std::log(4.0) + 1.0, 1e-6);
  }
}

TEST(Rope, LongRopeGoesByTheSequencesLength) {
  RopeScaling scaling;
  scaling.kind = RopeScaling::Kind::longrope;
  scaling.original_context = 100;
  scaling.attention_factor = 1.25;
  scaling.short_factors = {1.0, 2.0};
  scaling.long_factors = {3.0, 5.0};
  const RopeSettings settings{10000.0, scaling, 4};
  for (const size_t prompt : {1, 100, 101}) {
    const Rope rope(4, settings, prompt);
    const bool is_long = prompt > 100;
    EXPECT_DOUBLE_EQ(rope.frequencies()[0], is_long ? 1.0 / 3 : 1.0);
    EXPECT_DOUBLE_EQ(rope.frequencies()[1], is_long ? 0.01 / 5 : 0.01 / 2);
    EXPECT_EQ(rope.end() > 1000, is_long);
    float cosines[2], sines[2];
    rope.angles(0, cosines, sines);
    EXPECT_EQ(cosines[0], 1.25F);
  }
}

TEST(Rope, APartialOneLeavesTheRest) {
  const Rope rope(64, RopeSettings{10000.0, {}, 48});
  ASSERT_EQ(rope.pairs(), 24U);
  std::vector<float> x(2 * 64), cosines(24), sines(24);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  std::vector<float> turned = x;
  rope.angles(3, cosines.data(), sines.data());
  rope.rotate(turned.data(), 2, cosines.data(), sines.data());
  for (size_t head = 0; head < 2; ++head) {
    for (size_t i = 0; i < 64; ++i) {
      const size_t at = head * 64 + i;
      if (i >= 48) {
        EXPECT_EQ(turned[at], x[at]);
        continue;
      }
      const size_t pair = i % 24;
      const double angle = 3.0 * std::pow(10000.0, -2.0 * static_cast<double>(pair) / 48.0);
      const size_t low = head * 64 + pair;
      const auto expected = std::complex<double>(x[low], x[low + 24]) * std::polar(1.0, angle);
      EXPECT_NEAR(turned[at], i < 24 ? expected.real() : expected.imag(), 1e-4) << i;
    }
  }
}

TEST(Rope, RotatesPairsAsComplexNumbers) {
  const json config = llama31_config();
  const Rope rope = rope_of(config);
  constexpr size_t kHalf = 64;
  constexpr uint32_t kHeads = 3;
  std::mt19937 random(7);
  keyhole::test::Normal<float> normal;
  for (const uint32_t position : {0U, 1U, 77U, 8191U, 131071U}) {
    std::vector<float> x(kHeads * 2 * kHalf), cosines(kHalf), sines(kHalf);
    for (float& value : x) value = normal(random);
    std::vector<float> rotated = x;
    rope.angles(position, cosines.data(), sines.data());
    rope.rotate(rotated.data(), kHeads, cosines.data(), sines.data());
    for (size_t head = 0; head < kHeads; ++head) {
      for (size_t i = 0; i < kHalf; ++i) {
        const size_t low = head * 2 * kHalf + i;
        const double angle = position * testing::reference_frequency(config, i);
        const auto expected = std::complex<double>(x[low], x[low + kHalf]) * std::polar(1.0, angle);
        // One fp32 rounding of cos and sin, two of the products and their sum.
        EXPECT_NEAR(rotated[low], expected.real(), 1e-6 * (1.0 + std::abs(expected)));
        EXPECT_NEAR(rotated[low + kHalf], expected.imag(), 1e-6 * (1.0 + std::abs(expected)));
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::tools
