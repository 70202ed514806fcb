// The GPU decoder: random Llamas against a forward pass in double precision, and the hand-over of a prompt.
#include "tools/llama/gpu_decoder.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/relative_error.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/llama/gpu_sizes.h"
#include "tools/llama/host_decoder.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

std::vector<uint32_t> random_ids(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> tokens(count);
  for (uint32_t& token : tokens) token = random() % 37;
  return tokens;
}

LlamaModel loaded(const json& config, const SyntheticTensors& tensors, ElementType type) {
  const TemporaryFolder folder;
  write_model(folder.path(), config, tensors, type);
  return load_llama(folder.path());
}

/// |logits - expected| / |expected|. A prompt's activations have 16 bits (7.6e-6), and so short a one's attention two
/// fp16 for each number; three layers of random weights make that several times larger, and anything wrong some tenths.
constexpr double kAfterPrefill = 5e-4;

void expect_within(std::span<const float> logits, const std::vector<double>& expected,
                   double tolerance) {
  ASSERT_EQ(logits.size(), expected.size());
  EXPECT_LE(test::relative_error(logits.data(), expected), tolerance);
}

KeyholeCacheOptions exact_cache_on(keyhole_device device) {
  KeyholeCacheOptions options;
  options.max_tokens = 1024;
  options.sink = 4;
  options.window = 16;
  options.mode = KEYHOLE_MODE_EXACT;
  options.kv_dtype = KEYHOLE_F32;
  options.threads = 2;
  options.device = device;
  return options;
}

/// A variant of the model, and the dtype of its file.
class GpuRandomLlama : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    const json config = config_variant(name);
    const ElementType type = name == "f32"   ? ElementType::f32
                             : name == "f16" ? ElementType::f16
                                             : ElementType::bf16;
    const SyntheticTensors tensors = random_weights(config, type, 17);
    tokens_ = random_ids(150, 5);
    model_ = loaded(config, tensors, type);
    if (const std::string refusal = gpu_refusal(model_.config); !refusal.empty()) {
      GTEST_SKIP() << refusal;
    }
    expected_ = reference_logits(config, tensors, tokens_);
    gpu_ = std::make_unique<GpuModel>(model_);
  }

  void expect_steps(keyhole_device device) {
    for (const size_t prompt : {1, 60, 140}) {
      SCOPED_TRACE(prompt);
      KeyholeCache cache(model_.config, exact_cache_on(device));
      GpuDecoder decoder(*gpu_, cache);
      expect_within(decoder.prefill({tokens_.data(), prompt}), expected_[prompt - 1],
                    kAfterPrefill);
      cache.build(nullptr, nullptr);
      for (size_t t = prompt; t < tokens_.size(); ++t) {
        expect_within(decoder.step(tokens_[t]), expected_[t], kAfterPrefill);
      }
      EXPECT_EQ(decoder.tokens(), tokens_.size());
      EXPECT_EQ(decoder.times().steps, tokens_.size() - prompt);
      EXPECT_GT(decoder.times().attention, 0.0);
      decoder.truncate(static_cast<uint32_t>(prompt) + 5);
      expect_within(decoder.step(tokens_[prompt + 5]), expected_[prompt + 5], kAfterPrefill);
    }
  }

  std::vector<uint32_t> tokens_;
  std::vector<std::vector<double>> expected_;
  LlamaModel model_;
  std::unique_ptr<GpuModel> gpu_;
};

TEST_P(GpuRandomLlama, PrefillGivesTheReferenceLogitsAtEveryLength) {
  for (const size_t length : {1, 2, 43, 64, 65, 128, 129, 150}) {
    SCOPED_TRACE(length);
    expect_within(gpu_prefill(*gpu_, {tokens_.data(), length}, {}), expected_[length - 1],
                  kAfterPrefill);
  }
}

/// Nothing is rounded to fp16 here: the products alone.
TEST_P(GpuRandomLlama, StepsFromAHostPrefillAreAsGoodAsTheHosts) {
  Team team(2);
  KeyholeCache cache(model_.config, exact_cache_on(KEYHOLE_DEVICE_HOST));
  HostDecoder host(model_, cache, team);
  (void)host.prefill({tokens_.data(), 100});
  GpuDecoder decoder(*gpu_, cache, 100);
  for (size_t t = 100; t < tokens_.size(); ++t) {
    expect_within(decoder.step(tokens_[t]), expected_[t], 5e-5);
  }
}

TEST_P(GpuRandomLlama, StepsWithAHostSessionGiveTheReferenceLogits) {
  expect_steps(KEYHOLE_DEVICE_HOST);
}

TEST_P(GpuRandomLlama, StepsWithADeviceSessionGiveTheReferenceLogits) {
  // Where the library has no such device, the host's.
  expect_steps(KEYHOLE_DEVICE_AUTO);
}

/// Later prompts: several tokens at once, and steps between them.
TEST_P(GpuRandomLlama, TokensTakenTogetherAreThoseOfSteps) {
  for (const keyhole_device device : {KEYHOLE_DEVICE_HOST, KEYHOLE_DEVICE_AUTO}) {
    KeyholeCache cache(model_.config, exact_cache_on(device));
    GpuDecoder decoder(*gpu_, cache);
    (void)decoder.prefill({tokens_.data(), 20});
    cache.build(nullptr, nullptr);
    size_t taken = 20;
    for (const size_t count : {2, 37, 1, 64, 5}) {
      SCOPED_TRACE(std::to_string(taken) + " and " + std::to_string(count));
      expect_within(decoder.extend({&tokens_[taken], count}), expected_[taken + count - 1],
                    kAfterPrefill);
      taken += count;
      EXPECT_EQ(decoder.tokens(), taken);
      expect_within(decoder.step(tokens_[taken]), expected_[taken], kAfterPrefill);
      ++taken;
    }
    decoder.truncate(50);
    expect_within(decoder.extend({&tokens_[50], 30}), expected_[79], kAfterPrefill);
    const std::vector<uint32_t> too_many(kGpuTokensAtOnce + 1);
    EXPECT_THROW((void)decoder.extend(too_many), std::runtime_error);
    // A token that there is not: nothing of the chunk stays.
    EXPECT_THROW((void)decoder.extend(std::vector<uint32_t>{1, 37}), std::runtime_error);
    EXPECT_EQ(decoder.tokens(), 80U);
    expect_within(decoder.step(tokens_[80]), expected_[80], kAfterPrefill);
  }
}

/// A session that fails in the middle, layer by layer: it holds what was there before.
TEST_P(GpuRandomLlama, AFailedExtensionLeavesNothing) {
  KeyholeCacheOptions options = exact_cache_on(KEYHOLE_DEVICE_HOST);
  options.max_tokens = 40;
  KeyholeCache cache(model_.config, options);
  GpuDecoder decoder(*gpu_, cache);
  (void)decoder.prefill({tokens_.data(), 30});
  EXPECT_ANY_THROW((void)decoder.extend({&tokens_[30], 20}));
  EXPECT_EQ(decoder.tokens(), 30U);
  EXPECT_EQ(cache.layer_tokens(0).total, 30U);
  expect_within(decoder.extend({&tokens_[30], 10}), expected_[39], kAfterPrefill);
}

TEST_P(GpuRandomLlama, AHookSeesWhatTheStepUsed) {
  KeyholeCache cache(model_.config, exact_cache_on(KEYHOLE_DEVICE_AUTO));
  GpuDecoder decoder(*gpu_, cache);
  (void)decoder.prefill({tokens_.data(), 50});
  std::vector<uint32_t> layers;
  decoder.set_attention_hook([&](uint32_t layer, const float* q, const float* out) {
    layers.push_back(layer);
    std::vector<float> again(model_.config.q_width());
    cache.attend(layer, q, again.data());
    for (size_t i = 0; i < again.size(); ++i) EXPECT_EQ(again[i], out[i]);
  });
  expect_within(decoder.step(tokens_[50]), expected_[50], kAfterPrefill);
  EXPECT_EQ(layers, (std::vector<uint32_t>{0, 1, 2}));
}

INSTANTIATE_TEST_SUITE_P(Variants, GpuRandomLlama,
                         ::testing::Values("plain", "tied", "one_kv_head", "wide_heads",
                                           "head_dim_80", "linear", "f16", "f32"),
                         [](const auto& variant) { return variant.param; });

/// More than one chunk, so that hand-overs alternate between two buffers.
TEST(GpuPrefill, HandsOverWhatTheHostDoes) {
  const LlamaModel model = loaded(
      small_config(), random_weights(small_config(), ElementType::bf16, 2), ElementType::bf16);
  if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
    GTEST_SKIP() << refusal;
  }
  GpuModel gpu(model);
  gpu.set_products(PromptProducts::exact);  // as the host computes
  const std::vector<uint32_t> tokens = random_ids(8192 * 2 + 77, 6);
  const size_t q_width = model.config.q_width();
  const size_t kv_width = model.config.kv_width();
  struct Rows {
    std::vector<float> q, k, v;
  };
  const auto collect = [&](std::vector<Rows>& layers) {
    layers.resize(model.config.layers);
    return [&](const LayerChunk& chunk) {
      Rows& rows = layers[chunk.layer];
      EXPECT_EQ(chunk.first_token * kv_width, rows.k.size());
      rows.q.insert(rows.q.end(), chunk.q, chunk.q + chunk.tokens * q_width);
      rows.k.insert(rows.k.end(), chunk.k, chunk.k + chunk.tokens * kv_width);
      rows.v.insert(rows.v.end(), chunk.v, chunk.v + chunk.tokens * kv_width);
    };
  };
  std::vector<Rows> host_layers, gpu_layers;
  Team team(2);
  const std::vector<float> host_logits = prefill(model, team, tokens, collect(host_layers));
  double done = 0.0;
  const std::vector<float> gpu_logits =
      gpu_prefill(gpu, tokens, collect(gpu_layers), [&](double fraction) {
        EXPECT_GE(fraction, done);
        done = fraction;
      });
  EXPECT_NEAR(done, 1.0, 1e-9);
  const auto expect_near = [](const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    EXPECT_LT(test::relative_error(a.data(), b), 1e-3);
  };
  expect_near(gpu_logits, host_logits);
  for (uint32_t layer = 0; layer < model.config.layers; ++layer) {
    SCOPED_TRACE(layer);
    expect_near(gpu_layers[layer].q, host_layers[layer].q);
    expect_near(gpu_layers[layer].k, host_layers[layer].k);
    expect_near(gpu_layers[layer].v, host_layers[layer].v);
  }
}

TEST(GpuPrefill, ACallbackMayGiveUp) {
  const LlamaModel model = loaded(
      small_config(), random_weights(small_config(), ElementType::bf16, 2), ElementType::bf16);
  if (const std::string refusal = gpu_refusal(model.config); !refusal.empty()) {
    GTEST_SKIP() << refusal;
  }
  const GpuModel gpu(model);
  const std::vector<uint32_t> tokens = random_ids(600, 7);
  struct GivenUp {};
  const auto give_up = [&](auto&&...) { throw GivenUp(); };
  EXPECT_THROW((void)gpu_prefill(gpu, tokens, {}, give_up), GivenUp);
  EXPECT_THROW((void)gpu_prefill(gpu, tokens, give_up), GivenUp);
  EXPECT_EQ(gpu_prefill(gpu, tokens, {}).size(), 37U);
}

TEST(GpuRefusal, NamesWhatTheModelHasThatTheGpuCannot) {
  LlamaConfig config;
  config.head_dim = 112;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  // On any machine: this head_dim runs nowhere.
  EXPECT_FALSE(gpu_refusal(config).empty());
}

}  // namespace
}  // namespace keyhole::tools
