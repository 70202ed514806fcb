// K and V of sliding layers: what is attended to, across the ring's end and after going back, against double precision.
#include "tests/tools/llama/host_windows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "runtime/files/element.h"
#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kWindow = 21;
constexpr uint32_t kDim = 64;

LlamaConfig model(double softcap = 0.0) {
  LlamaConfig config;
  config.layers = 3;
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = kDim;
  config.windows = {kWindow, 0, 2 * kWindow};
  config.attention_scale = 0.2;
  config.attention_softcap = softcap;
  return config;
}

std::vector<float> normal(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

/// K and V of every token of one layer, `[tokens, 2, d]`, as `type` holds them.
struct Rows {
  std::vector<float> k, v;
  explicit Rows(size_t tokens, ElementType type = ElementType::f32)
      : k(normal(tokens * 2 * kDim, 1)), v(normal(tokens * 2 * kDim, 2)) {
    for (std::vector<float>* rows : {&k, &v}) {
      std::vector<std::byte> bytes(rows->size() * element_size(type));
      elements_from_f32(type, *rows, bytes);
      elements_to_f32(type, bytes, *rows);
    }
  }
  [[nodiscard]] const float* k_of(size_t token) const { return &k[token * 2 * kDim]; }
  [[nodiscard]] const float* v_of(size_t token) const { return &v[token * 2 * kDim]; }
};

/// Token `token` with q `[4, d]`.
void expect_attention(const LlamaConfig& config, uint32_t layer, const Rows& rows, size_t token,
                      const std::vector<float>& q, const std::vector<float>& out) {
  const size_t window = config.windows[layer];
  const size_t oldest = token < window ? 0 : token + 1 - window;
  for (size_t head = 0; head < 4; ++head) {
    const size_t offset = head / 2 * kDim;
    std::vector<double> expected(kDim, 0.0);
    double sum = 0.0;
    for (size_t t = oldest; t <= token; ++t) {
      double logit = 0.0;
      for (size_t i = 0; i < kDim; ++i) {
        logit += static_cast<double>(q[head * kDim + i]) * rows.k_of(t)[offset + i];
      }
      logit *= config.attention_scale;
      const double cap = config.attention_softcap;
      if (cap > 0.0) logit = cap * std::tanh(logit / cap);
      const double weight = std::exp(logit);
      sum += weight;
      for (size_t i = 0; i < kDim; ++i) expected[i] += weight * rows.v_of(t)[offset + i];
    }
    for (size_t i = 0; i < kDim; ++i) {
      ASSERT_NEAR(out[head * kDim + i], expected[i] / sum, 1e-5) << "token " << token;
    }
  }
}

class Windows : public ::testing::TestWithParam<ElementType> {};

TEST_P(Windows, AttendToTheLastTokensStepByStep) {
  Team team(2);
  for (const double softcap : {0.0, 2.0}) {
    const LlamaConfig config = model(softcap);
    const Rows rows(70, GetParam());
    SlidingWindows windows(config, GetParam(), 100);
    for (size_t token = 0; token < 70; ++token) {
      for (const uint32_t layer : {0U, 2U}) {
        windows.append(layer, 1, rows.k_of(token), rows.v_of(token));
        const std::vector<float> q = normal(4 * kDim, static_cast<uint32_t>(token) + 10);
        std::vector<float> out(4 * kDim);
        windows.attend(layer, q.data(), out.data(), token % 2 == 0 ? &team : nullptr);
        expect_attention(config, layer, rows, token, q, out);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Windows,
                         ::testing::Values(ElementType::f32, ElementType::f16, ElementType::bf16),
                         [](const auto& dtype) { return element_name(dtype.param); });

/// Past the end of the ring, in chunks longer than it too, and back by as much as is kept.
TEST(SlidingWindows, GoBackAsFarAsTheyHold) {
  const LlamaConfig config = model();
  const size_t slots = kWindow + SlidingWindows::kSlack;
  const size_t tokens = 2 * slots + 100;
  const Rows rows(tokens);
  SlidingWindows windows(config, ElementType::f32, 0);
  for (const uint32_t layer : {0U, 2U}) {
    windows.append(layer, tokens - 50, rows.k.data(), rows.v.data());
    windows.append(layer, 50, rows.k_of(tokens - 50), rows.v_of(tokens - 50));
  }
  const std::vector<float> q = normal(4 * kDim, 3);
  std::vector<float> out(4 * kDim);
  const auto check = [&](size_t token) {
    for (const uint32_t layer : {0U, 2U}) {
      windows.attend(layer, q.data(), out.data(), nullptr);
      expect_attention(config, layer, rows, token, q, out);
    }
  };
  check(tokens - 1);

  // The first layer holds the last `slots` tokens: token t needs t - 20 and later.
  const auto furthest = static_cast<uint32_t>(tokens - slots + kWindow - 1);
  const std::string error = error_of([&] { windows.truncate(furthest - 1); });
  EXPECT_NE(error.find("allowed: " + std::to_string(furthest) + " or more"), std::string::npos)
      << error;
  check(tokens - 1);  // nothing has changed

  windows.truncate(furthest);
  for (size_t token = furthest; token < furthest + 60; ++token) {
    for (const uint32_t layer : {0U, 2U}) {
      windows.append(layer, 1, rows.k_of(token), rows.v_of(token));
    }
    check(token);
  }
  // What was forgotten is not to be had again.
  EXPECT_NE(error_of([&] { windows.truncate(furthest - 1); }), "");
  windows.truncate(furthest + 10);
  // But to begin again is always possible.
  windows.truncate(0);
  for (size_t token = 0; token < 20; ++token) {
    for (const uint32_t layer : {0U, 2U}) {
      windows.append(layer, 1, rows.k_of(token), rows.v_of(token));
    }
    check(token);
  }
}

TEST(SlidingWindows, AShortSequenceGoesBackToItsBegin) {
  const LlamaConfig config = model();
  const Rows rows(80);
  SlidingWindows windows(config, ElementType::f32, 80);
  windows.append(0, 80, rows.k.data(), rows.v.data());
  windows.truncate(3);
  windows.append(0, 1, rows.k_of(3), rows.v_of(3));
  const std::vector<float> q = normal(4 * kDim, 3);
  std::vector<float> out(4 * kDim);
  windows.attend(0, q.data(), out.data(), nullptr);
  expect_attention(config, 0, rows, 3, q, out);
  EXPECT_NE(
      error_of([&] { windows.append(0, 77, rows.k.data(), rows.v.data()); }).find("allowed: 80"),
      std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
