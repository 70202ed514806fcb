// A cache whose tokens age, between steps, in copies and when tokens are taken back, against attention in double
// precision to what such a cache holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "runtime/files/float16.h"
#include "tests/normal.h"
#include "tools/caches/kivi.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {
namespace {

constexpr uint32_t kLayers = 2, kQHeads = 2, kDim = 64;

LlamaConfig aging_model() {
  LlamaConfig model;
  model.layers = kLayers;
  model.q_heads = kQHeads;
  model.kv_heads = 1;
  model.head_dim = kDim;
  model.attention_scale = 0.3;
  model.windows.assign(kLayers, 0);
  return model;
}

/// Rows of all tokens of one layer, as a model would make them.
struct LayerRows {
  std::vector<float> q, k, v;
};

class AgingCache : public ::testing::Test {
 protected:
  AgingCache() {
    std::mt19937 random(41);
    keyhole::test::Normal<float> normal;
    const auto fill = [&](std::vector<float>& rows, size_t count) {
      rows.resize(count);
      for (float& x : rows) x = normal(random);
    };
    for (LayerRows& layer : layers_) {
      fill(layer.q, kTokens * kQHeads * kDim);
      fill(layer.k, kTokens * kDim);
      fill(layer.v, kTokens * kDim);
    }
  }

  static KeyholeCache make() {
    KeyholeCacheOptions options;
    options.max_tokens = kTokens;
    options.sink = 4;
    options.window = 64;
    options.threads = 1;
    options.mode = KEYHOLE_MODE_EXACT;
    options.kv_dtype = KEYHOLE_F32;
    options.aging = make_kivi(2, kDim);
    return {aging_model(), options};
  }

  void prefill(KeyholeCache& cache, size_t first, size_t count) const {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const LayerRows& rows = layers_[layer];
      cache.prefill({layer, first, count, rows.q.data() + first * kQHeads * kDim,
                     rows.k.data() + first * kDim, rows.v.data() + first * kDim});
    }
  }

  /// One token's step, whose answers must be those of the definition.
  void step(KeyholeCache& cache, size_t token) const {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const LayerRows& rows = layers_[layer];
      std::vector<float> out(kQHeads * kDim);
      cache.attend(layer, rows.q.data() + token * kQHeads * kDim, rows.k.data() + token * kDim,
                   rows.v.data() + token * kDim, out.data());
      expect_attention(rows, token, out);
    }
  }

  // A step sees the cache as it was behind the token before, and its own token in 16 bits.
  void expect_attention(const LayerRows& rows, size_t token, const std::vector<float>& out) const {
    const std::vector<double> k = held(rows.k, KvRows::keys, token);
    const std::vector<double> v = held(rows.v, KvRows::values, token);
    for (size_t h = 0; h < kQHeads; ++h) {
      const float* q = rows.q.data() + (token * kQHeads + h) * kDim;
      std::vector<double> expected(kDim);
      double all = 0;
      for (size_t t = 0; t <= token; ++t) {
        double product = 0;
        for (size_t c = 0; c < kDim; ++c) product += q[c] * k[t * kDim + c];
        const double w = std::exp(0.3 * product);
        all += w;
        for (size_t c = 0; c < kDim; ++c) expected[c] += w * v[t * kDim + c];
      }
      for (size_t c = 0; c < kDim; ++c) {
        ASSERT_NEAR(out[h * kDim + c], expected[c] / all, 2e-5) << "token " << token;
      }
    }
  }

  /// What KIVI holds of the first `tokens` tokens, and of the next one, which is in 16 bits.
  static std::vector<double> held(const std::vector<float>& rows, KvRows kind, size_t tokens) {
    std::vector<float> all(rows.begin(),
                           rows.begin() + static_cast<ptrdiff_t>((tokens + 1) * kDim));
    for (float& x : all) x = f16_to_f32(f32_to_f16(x));
    const size_t old = kind == KvRows::keys ? tokens / 128 * 128
                       : tokens < 128       ? 0
                                            : (tokens - 128) / 32 * 32;
    // KIVI's own rounding is tested by itself.
    make_kivi(2, kDim)->pass(0, 0, kind, all.data(), old);
    return {all.begin(), all.end()};
  }

  static constexpr size_t kTokens = 700;
  LayerRows layers_[kLayers];
};

TEST_F(AgingCache, AttendsToWhatIsHeldBetweenSteps) {
  KeyholeCache cache = make();
  prefill(cache, 0, 150);
  prefill(cache, 150, 147);
  for (size_t token = 297; token < 400; ++token) step(cache, token);
}

TEST_F(AgingCache, TokensThatAreTakenBackAreYoungAgain) {
  KeyholeCache cache = make();
  prefill(cache, 0, 250);
  for (size_t token = 250; token < 300; ++token) step(cache, token);
  cache.truncate(250);
  for (size_t token = 250; token < 300; ++token) step(cache, token);
  cache.truncate(100);
  prefill(cache, 100, 60);
  for (size_t token = 160; token < 170; ++token) step(cache, token);
  cache.truncate(0);
  prefill(cache, 0, 40);
  step(cache, 40);
}

TEST_F(AgingCache, CopiesGoOnByThemselves) {
  KeyholeCache cache = make();
  prefill(cache, 0, 250);
  KeyholeCache before = cache.fork();  // whose rows have not come to its session
  for (size_t token = 250; token < 258; ++token) step(cache, token);
  KeyholeCache after = cache.fork();
  for (size_t token = 250; token < 260; ++token) step(before, token);
  for (size_t token = 258; token < 290; ++token) step(after, token);
  for (size_t token = 258; token < 262; ++token) step(cache, token);
}

TEST_F(AgingCache, TurnsAttendToTheirOwnTokensIn16Bits) {
  KeyholeCache cache = make();
  prefill(cache, 0, 200);
  constexpr size_t kTurn = 100;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const LayerRows& rows = layers_[layer];
    std::vector<float> out(kTurn * kQHeads * kDim);
    cache.extend({layer, 200, kTurn, rows.q.data() + 200 * kQHeads * kDim,
                  rows.k.data() + 200 * kDim, rows.v.data() + 200 * kDim},
                 out.data());
    // Its first token sees what a step would.
    expect_attention(rows, 200, out);
  }
  for (size_t token = 300; token < 310; ++token) step(cache, token);
}

TEST(AgingRows, ForgetsWhatNoStateNeeds) {
  AgingRows rows(make_kivi(2, kDim), 1, 1, 1, kDim);
  const std::vector<float> zeros(1000 * kDim);
  for (int i = 0; i < 20; ++i) rows.add(0, zeros.data(), zeros.data(), 1000);
  rows.forget_old();
  std::vector<float> k, v;
  const uint32_t settled = rows.settled(20000 - AgingRows::kSlack);
  rows.content(0, settled, k, v);
  EXPECT_EQ(k.size(), (20000 - settled) * kDim);
  EXPECT_THROW(rows.truncate(10000), std::runtime_error);
  EXPECT_EQ(rows.tokens(0), 20000U);
  rows.truncate(20000 - AgingRows::kSlack);
  EXPECT_EQ(rows.tokens(0), 20000U - AgingRows::kSlack);
}

}  // namespace
}  // namespace keyhole::tools
