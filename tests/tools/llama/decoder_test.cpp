// Prefill and decoding steps of random models against an independent forward pass in double precision.
#include "tools/llama/host_decoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "tests/sanitized.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/generation/sequence.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

std::vector<uint32_t> random_tokens(size_t count, uint32_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> tokens(count);
  for (uint32_t& token : tokens)
    token = std::uniform_int_distribution<uint32_t>(0, vocab - 1)(random);
  return tokens;
}

void expect_close(std::span<const float> logits, const std::vector<double>& expected) {
  ASSERT_EQ(logits.size(), expected.size());
  double largest = 0.0;
  for (const double logit : expected) largest = std::max(largest, std::abs(logit));
  for (size_t i = 0; i < logits.size(); ++i)
    EXPECT_NEAR(logits[i], expected[i], 2e-5 * largest) << i;
}

KeyholeCacheOptions exact_cache() {
  KeyholeCacheOptions options;
  options.max_tokens = 1024;
  options.sink = 4;
  options.window = 16;
  options.mode = KEYHOLE_MODE_EXACT;
  options.kv_dtype = KEYHOLE_F32;
  options.threads = 2;
  return options;
}

class RandomLlama : public ::testing::TestWithParam<std::string> {
 protected:
  RandomLlama()
      : config_(config_variant(GetParam())),
        tensors_(random_weights(config_, ElementType::bf16, 17)),
        tokens_(random_tokens(150, 37, 5)),
        expected_(expected()) {
    const TemporaryFolder folder;
    write_model(folder.path(), config_, tensors_, ElementType::bf16, 2);
    model_ = load_llama(folder.path());
  }

  /// Worked out once for all tests of a variant.
  const std::vector<std::vector<double>>& expected() {
    static std::map<std::string, std::vector<std::vector<double>>> known;
    const auto [at, is_new] = known.try_emplace(GetParam());
    if (is_new) at->second = reference_logits(config_, tensors_, tokens_);
    return at->second;
  }

  json config_;
  SyntheticTensors tensors_;
  std::vector<uint32_t> tokens_;
  const std::vector<std::vector<double>>& expected_;  // logits after each token
  LlamaModel model_;
  Team team_{2};
};

TEST_P(RandomLlama, PrefillGivesTheReferenceLogitsAtEveryLength) {
  for (const size_t length :
       keyhole::test::unless_sanitized(std::vector<size_t>{1, 2, 65, 64, 150, 43}, 2)) {
    SCOPED_TRACE(length);
    expect_close(prefill(model_, team_, {tokens_.data(), length}, {}), expected_[length - 1]);
  }
}

TEST_P(RandomLlama, StepsThroughKeyholeGiveTheReferenceLogits) {
  for (const size_t prompt : {1, 60, 140}) {
    SCOPED_TRACE(prompt);
    KeyholeCache cache(model_.config, exact_cache());
    HostDecoder decoder(model_, cache, team_);
    expect_close(decoder.prefill({tokens_.data(), prompt}), expected_[prompt - 1]);
    cache.build(nullptr, nullptr);
    for (size_t t = prompt; t < tokens_.size(); ++t) {
      expect_close(decoder.step(tokens_[t]), expected_[t]);
    }
    EXPECT_EQ(decoder.tokens(), tokens_.size());
    EXPECT_EQ(decoder.times().steps, tokens_.size() - prompt);

    decoder.truncate(static_cast<uint32_t>(prompt) + 5);
    expect_close(decoder.step(tokens_[prompt + 5]), expected_[prompt + 5]);
  }
}

TEST_P(RandomLlama, TokensTakenTogetherHaveTheReferenceLogitsEach) {
  KeyholeCache cache(model_.config, exact_cache());
  HostDecoder decoder(model_, cache, team_);
  (void)decoder.prefill({tokens_.data(), 100});
  std::vector<float> logits;
  const size_t vocabulary = model_.config.vocab_size;
  for (const size_t count : {1U, 2U, 9U, 20U}) {
    SCOPED_TRACE(count);
    decoder.extend_each({tokens_.data() + 100, count}, logits);
    ASSERT_EQ(logits.size(), count * vocabulary);
    for (size_t i = 0; i < count; ++i) {
      expect_close({logits.data() + i * vocabulary, vocabulary}, expected_[100 + i]);
    }
    EXPECT_EQ(decoder.tokens(), 100 + count);
    decoder.truncate(100);
  }
}

TEST_P(RandomLlama, AFlatIndexThatReturnsEveryKeyIsExact) {
  KeyholeCacheOptions options = exact_cache();
  options.mode = KEYHOLE_MODE_INDEXED;
  options.index = "flat";
  options.top_k = 1024;
  KeyholeCache cache(model_.config, options);
  HostDecoder decoder(model_, cache, team_);
  expect_close(decoder.prefill({tokens_.data(), 100}), expected_[99]);
  cache.build(nullptr, nullptr);
  if (model_.config.full_layers() > 0) {
    const uint32_t full = model_.config.slides(0) ? 1 : 0;
    EXPECT_GT(cache.layer_tokens(full).indexed, 0U);
  }
  for (size_t t = 100; t < tokens_.size(); ++t)
    expect_close(decoder.step(tokens_[t]), expected_[t]);
}

INSTANTIATE_TEST_SUITE_P(Variants, RandomLlama,
                         ::testing::Values("plain", "tied", "multi_head", "one_kv_head", "linear",
                                           "llama3", "biases", "qwen3", "qwen3_sliding",
                                           "qwen3_all_sliding"),
                         [](const auto& variant) { return variant.param; });

/// A model for what does not depend on its weights.
LlamaModel any_model() {
  const TemporaryFolder folder;
  write_model(folder.path(), small_config(), random_weights(small_config(), ElementType::f32, 2),
              ElementType::f32);
  return load_llama(folder.path());
}

TEST(Prefill, HandsOverEveryTokenOfEveryLayerOnceAndInOrder) {
  const LlamaModel model = any_model();
  Team team(2);
  const std::vector<uint32_t> tokens = random_tokens(4100, 37, 6);  // more than a hand-over
  uint32_t layer = 0;
  size_t next = 0;
  double done = 0.0;
  (void)prefill(
      model, team, tokens,
      [&](const LayerChunk& chunk) {
        if (next == tokens.size()) {
          ++layer;
          next = 0;
        }
        EXPECT_EQ(chunk.layer, layer);
        EXPECT_EQ(chunk.first_token, next);
        next += chunk.tokens;
      },
      [&](double fraction) {
        EXPECT_GE(fraction, done);
        done = fraction;
      });
  EXPECT_EQ(layer, 2U);
  EXPECT_EQ(next, tokens.size());
  EXPECT_NEAR(done, 1.0, 1e-9);
}

TEST(Prefill, ACallbackMayGiveUp) {
  const LlamaModel model = any_model();
  Team team(2);
  const std::vector<uint32_t> tokens = random_tokens(600, 37, 7);
  struct GivenUp {};
  int calls = 0;
  EXPECT_THROW((void)prefill(model, team, tokens, {},
                             [&](double) {
                               if (++calls == 2) throw GivenUp();
                             }),
               GivenUp);
  EXPECT_EQ(prefill(model, team, tokens, {}).size(), 37U);
}

TEST(Prefill, RefusesTokensOutsideTheVocabulary) {
  const LlamaModel model = any_model();
  Team team(1);
  const std::string error = error_of([&] {
    (void)prefill(model, team, std::vector<uint32_t>{1, 37}, {});
  });
  EXPECT_NE(error.find("token 1 is 37; allowed: 0 to 36"), std::string::npos) << error;
  EXPECT_NE(error_of([&] { (void)prefill(model, team, {}, {}); }).find("empty"), std::string::npos);
}

TEST(Decoder, AnAttentionHookSeesWhatTheStepUsed) {
  const LlamaModel model = any_model();
  Team team(1);
  KeyholeCache cache(model.config, exact_cache());
  HostDecoder decoder(model, cache, team);
  (void)decoder.prefill(random_tokens(50, 37, 8));
  std::vector<uint32_t> layers;
  decoder.set_attention_hook([&](uint32_t layer, const float* q, const float* out) {
    layers.push_back(layer);
    std::vector<float> again(model.config.q_width());
    cache.attend(layer, q, again.data());
    for (size_t i = 0; i < again.size(); ++i) EXPECT_EQ(again[i], out[i]);
  });
  (void)decoder.step(3);
  EXPECT_EQ(layers, (std::vector<uint32_t>{0, 1, 2}));
}

TEST(Decoder, AnAttentionHookSeesKeyholesLayersOnly) {
  const json config = config_variant("qwen3_sliding");
  const TemporaryFolder folder;
  write_model(folder.path(), config, random_weights(config, ElementType::f32, 2), ElementType::f32);
  const LlamaModel model = load_llama(folder.path());
  Team team(1);
  KeyholeCache cache(model.config, exact_cache());
  HostDecoder decoder(model, cache, team);
  (void)decoder.prefill(random_tokens(50, 37, 8));
  std::vector<uint32_t> layers;
  decoder.set_attention_hook(
      [&](uint32_t layer, const float*, const float*) { layers.push_back(layer); });
  (void)decoder.step(3);
  EXPECT_EQ(layers, std::vector<uint32_t>{1});
}

TEST(Decoder, LongRopeEndsWhereItsFrequenciesChange) {
  json config = small_config();
  config["rope_scaling"] = {{"rope_type", "longrope"},
                            {"short_factor", std::vector<double>(32, 1.0)},
                            {"long_factor", std::vector<double>(32, 2.0)},
                            {"original_max_position_embeddings", 60},
                            {"attention_factor", 1.0}};
  const SyntheticTensors tensors = random_weights(config, ElementType::f32, 2);
  const TemporaryFolder folder;
  write_model(folder.path(), config, tensors, ElementType::f32);
  const LlamaModel model = load_llama(folder.path());
  const std::vector<uint32_t> tokens = random_tokens(70, 37, 8);
  Team team(2);
  KeyholeCache cache(model.config, exact_cache());
  HostDecoder decoder(model, cache, team);
  (void)decoder.prefill(std::span(tokens).first(58));
  (void)decoder.step(1);
  (void)decoder.step(2);
  const std::string error = error_of([&] { (void)decoder.step(3); });
  EXPECT_NE(error.find("has reached 60 tokens"), std::string::npos) << error;
  EXPECT_EQ(decoder.tokens(), 60U);
  EXPECT_FALSE(decoder.turns_otherwise(60));
  EXPECT_TRUE(decoder.turns_otherwise(61));

  // From a longer prompt on it is linear scaling by 2, as all long factors are 2 here.
  json linear = config;
  linear["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  const auto expected = reference_logits(linear, tensors, tokens);
  KeyholeCache other(model.config, exact_cache());
  HostDecoder longer(model, other, team);
  expect_close(longer.prefill(std::span(tokens).first(61)), expected[60]);
  for (size_t t = 61; t < 70; ++t) expect_close(longer.step(tokens[t]), expected[t]);

  // Cut back it is turned as before, by whatever decoder goes on with it.
  longer.truncate(50);
  EXPECT_EQ(longer.rope_tokens(), 61U);
  EXPECT_TRUE(longer.turns_otherwise(51));
  HostDecoder loaded(model, other, team, HeldTokens(50, longer.rope_tokens()));
  for (size_t t = 50; t < 70; ++t) expect_close(loaded.step(tokens[t]), expected[t]);

  // A sequence that grows past the end is that of a long prompt from there on, one that is cut back that of a short.
  decoder.truncate(0);
  Sequence sequence(decoder);
  (void)sequence.bring_to(std::span(tokens).first(58));
  for (size_t t = 58; t < 70; ++t) {
    const std::span<const float> logits = sequence.step(tokens[t]);
    if (t >= 60) expect_close(logits, expected[t]);
  }
  json plain = config;
  plain.erase("rope_scaling");
  const auto within =
      reference_logits(plain, tensors, std::vector(tokens.begin(), tokens.begin() + 60));
  sequence.truncate(55);
  for (size_t t = 55; t < 60; ++t) expect_close(sequence.step(tokens[t]), within[t]);
}

TEST(KeyholeCache, AForkOfSlidingLayersGoesOnByItself) {
  const json config = config_variant("qwen3_all_sliding");
  const SyntheticTensors tensors = random_weights(config, ElementType::f32, 2);
  const TemporaryFolder folder;
  write_model(folder.path(), config, tensors, ElementType::f32);
  const LlamaModel model = load_llama(folder.path());
  const std::vector<uint32_t> tokens = random_tokens(60, 37, 8);
  const auto expected = reference_logits(config, tensors, tokens);
  Team team(2);
  KeyholeCache cache(model.config, exact_cache());
  HostDecoder decoder(model, cache, team);
  (void)decoder.prefill(std::span(tokens).first(50));
  KeyholeCache copy = cache.fork();
  HostDecoder other(model, copy, team, 50);
  for (int i = 0; i < 5; ++i) (void)other.step(7);
  for (size_t t = 50; t < 60; ++t) expect_close(decoder.step(tokens[t]), expected[t]);
}

TEST(KeyholeCache, PassesOnWhatTheLibrarySays) {
  const LlamaModel model = any_model();
  KeyholeCacheOptions options = exact_cache();
  options.index = "nonsense";
  EXPECT_NE(error_of([&] { KeyholeCache(model.config, options); }).find("nonsense"),
            std::string::npos);
  options = exact_cache();
  options.max_tokens = 10;
  KeyholeCache cache(model.config, options);
  Team team(1);
  HostDecoder decoder(model, cache, team);
  EXPECT_THROW((void)decoder.prefill(random_tokens(11, 37, 9)), LibraryError);
}

TEST(Greedy, TakesTheFirstOfTheLargest) {
  EXPECT_EQ(greedy(std::vector<float>{-3.0F, 2.0F, 2.0F, 1.0F}), 1U);
  EXPECT_EQ(greedy(std::vector<float>{-3.0F}), 0U);
}

}  // namespace
}  // namespace keyhole::tools
