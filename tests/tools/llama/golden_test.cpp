// The bundled model against golden.json: what an independent fp32 forward pass generates greedily, and its
// largest logits after the prompt.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "runtime/files/json.h"
#include "tests/temporary_folder.h"
#include "tools/llama/gpu_decoder.h"
#include "tools/llama/host_decoder.h"
#include "tools/tokenizer/byte_tokenizer.h"

namespace keyhole::tools {
namespace {

/// The source tree's, or for a program that was carried to a machine with a GPU, $KEYHOLE_MODEL.
const std::filesystem::path kModel =
    std::getenv("KEYHOLE_MODEL") != nullptr ? std::getenv("KEYHOLE_MODEL") : KEYHOLE_SOURCE_MODEL;

struct Golden {
  std::vector<uint32_t> prompt;
  std::vector<uint32_t> generated;
  std::vector<std::pair<uint32_t, float>> first_logits;
};

class GoldenTest : public ::testing::TestWithParam<size_t> {
 protected:
  static void SetUpTestSuite() { model() = load_llama(kModel); }
  static void TearDownTestSuite() { model() = {}; }
  static LlamaModel& model() {
    static LlamaModel instance;
    return instance;
  }

  static Golden golden(size_t index) {
    const nlohmann::json entry = nlohmann::json::parse(read_file(kModel / "golden.json")).at(index);
    Golden result;
    result.prompt = ByteTokenizer({.vocab_size = 264, .bos = 256, .end_tokens = {257}})
                        .encode_prompt(entry.at("prompt").get<std::string>());
    EXPECT_EQ(result.prompt.size(), entry.at("prompt_tokens").get<size_t>());
    result.generated = entry.at("generated_ids").get<std::vector<uint32_t>>();
    result.first_logits =
        entry.at("first_logits_top5").get<std::vector<std::pair<uint32_t, float>>>();
    return result;
  }

  static void expect_golden(const Golden& expected, keyhole_mode mode, bool gpu = false,
                            keyhole_device device = KEYHOLE_DEVICE_HOST) {
    KeyholeCacheOptions options;
    options.max_tokens = 4096;
    options.sink = 16;
    options.window = 64;
    options.mode = mode;
    options.top_k = 4096;  // covers every prompt
    options.kv_dtype = KEYHOLE_F32;
    options.device = device;
    KeyholeCache cache(model().config, options);
    Team team;
    std::unique_ptr<GpuModel> gpu_model;
    std::unique_ptr<Decoder> owner;
    if (gpu) {
      gpu_model = std::make_unique<GpuModel>(model());
      owner = std::make_unique<GpuDecoder>(*gpu_model, cache);
    } else {
      owner = std::make_unique<HostDecoder>(model(), cache, team);
    }
    Decoder& decoder = *owner;
    std::span<const float> logits = decoder.prefill(expected.prompt);
    cache.build(nullptr, nullptr);
    if (mode == KEYHOLE_MODE_INDEXED && expected.prompt.size() > 200) {
      EXPECT_GT(cache.layer_tokens(0).indexed, expected.prompt.size() / 2);
    }

    for (const auto& [token, logit] : expected.first_logits) {
      EXPECT_NEAR(logits[token], logit, gpu ? 3e-2 : 5e-3) << "token " << token;
    }
    EXPECT_EQ(greedy(logits), expected.first_logits.front().first);

    std::vector<uint32_t> generated{greedy(logits)};
    while (generated.size() < expected.generated.size()) {
      generated.push_back(greedy(decoder.step(generated.back())));
    }
    EXPECT_EQ(generated, expected.generated);
  }
};

TEST_P(GoldenTest, ExactAttentionGeneratesTheSame) {
  expect_golden(golden(GetParam()), KEYHOLE_MODE_EXACT);
}

TEST_P(GoldenTest, AFlatIndexThatReturnsEveryKeyGeneratesTheSame) {
  expect_golden(golden(GetParam()), KEYHOLE_MODE_INDEXED);
}

TEST_P(GoldenTest, TheGpuGeneratesTheSame) {
  if (const std::string refusal = gpu_refusal(model().config); !refusal.empty()) {
    GTEST_SKIP() << refusal;
  }
  for (const keyhole_device device : {KEYHOLE_DEVICE_HOST, KEYHOLE_DEVICE_AUTO}) {
    expect_golden(golden(GetParam()), KEYHOLE_MODE_EXACT, true, device);
    expect_golden(golden(GetParam()), KEYHOLE_MODE_INDEXED, true, device);
  }
}

/// The first step once more through the decoding path: prompt up to its last token, then one step.
TEST_P(GoldenTest, ADecodingStepGivesTheFirstLogits) {
  const Golden expected = golden(GetParam());
  KeyholeCacheOptions options;
  options.mode = KEYHOLE_MODE_EXACT;
  options.kv_dtype = KEYHOLE_F32;
  KeyholeCache cache(model().config, options);
  Team team;
  HostDecoder decoder(model(), cache, team);
  (void)decoder.prefill(std::span(expected.prompt).first(expected.prompt.size() - 1));
  const std::span<const float> logits = decoder.step(expected.prompt.back());
  for (const auto& [token, logit] : expected.first_logits) {
    EXPECT_NEAR(logits[token], logit, 5e-3) << "token " << token;
  }
}

std::string prompt_name(const ::testing::TestParamInfo<size_t>& index) {
  static const char* const names[] = {"kv", "passkey", "prose"};
  return names[index.param];
}

INSTANTIATE_TEST_SUITE_P(Prompts, GoldenTest, ::testing::Values(0, 1, 2), prompt_name);

}  // namespace
}  // namespace keyhole::tools
