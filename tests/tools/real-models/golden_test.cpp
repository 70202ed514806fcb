// The real models that tools/real-models brings, those that are in the cache: tokens of prompts, the tokens that follow
// them greedily with exact attention, and their text, beside those of Hugging Face transformers (golden/make.py).
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/tools/llama/run_json.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/llama/config.h"
#include "tools/tokenizer/tokenizer.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

std::filesystem::path cache_folder() {
  if (const char* cache = std::getenv("KEYHOLE_CACHE"); cache != nullptr && *cache != '\0') {
    return cache;
  }
  const char* home = std::getenv("HOME");
  return std::filesystem::path(home == nullptr ? "" : home) / ".cache/keyhole";
}

class RealModel : public ::testing::Test {
 protected:
  explicit RealModel(const std::string& name)
      : name_(name), folder_(cache_folder() / (name + "-f32")) {}

  void SetUp() override {
    if (!std::filesystem::exists(folder_ / "config.json")) {
      GTEST_SKIP() << folder_.string() << " is not there: tools/real-models/bring " << name_;
    }
    golden_ =
        json::parse(read_file(std::filesystem::path(KEYHOLE_REAL_GOLDEN) / (name_ + ".json")));
  }

  static std::string text_of(const json& prompt) {
    if (prompt.contains("text")) return prompt["text"];
    return read_file(std::filesystem::path(KEYHOLE_SOURCE_MODEL) / "haystack.txt")
        .substr(0, prompt["prose_bytes"]);
  }

  void expect_tokens_of_prompts() const {
    const LlamaConfig config = load_llama_config(folder_ / "config.json");
    const auto tokenizer =
        load_tokenizer(folder_, {.vocab_size = config.vocab_size, .bos = {}, .end_tokens = {}});
    ASSERT_GE(golden_["prompts"].size(), 8U);
    for (const json& prompt : golden_["prompts"]) {
      EXPECT_EQ(tokenizer->encode_prompt(text_of(prompt)),
                prompt["tokens"].get<std::vector<uint32_t>>())
          << prompt["name"];
    }
  }

  /// With a window that even short prompts leave.
  void expect_continuations() const {
    const TemporaryFolder folder;
    for (const json& prompt : golden_["prompts"]) {
      SCOPED_TRACE(prompt["name"].get<std::string>());
      write_file(folder / "prompt", text_of(prompt));
      const json result =
          run_json({"decode", "--model", folder_, "--prompt", folder / "prompt", "--generate",
                    std::to_string(prompt["generated"].size()), "--ignore-eos", "--index", "exact",
                    "--sink", "4", "--window", "16", "--kv-dtype", "f32", "--device", "host"});
      EXPECT_EQ(result["prompt_tokens"], prompt["tokens"].size());
      EXPECT_EQ(result["generated_ids"], prompt["generated"]);
      EXPECT_EQ(result["generated"], printable(prompt["generated_text"]));  // as JSON results are
    }
  }

  std::string name_;
  std::filesystem::path folder_;
  json golden_;
};

class RealSmolLM2 : public RealModel {
 protected:
  RealSmolLM2() : RealModel("smollm2-135m-instruct") {}
};
TEST_F(RealSmolLM2, HasTransformersTokensOfPrompts) { expect_tokens_of_prompts(); }
TEST_F(RealSmolLM2, ContinuesAsTransformersDoes) { expect_continuations(); }

class RealGemma3 : public RealModel {
 protected:
  RealGemma3() : RealModel("gemma3-270m") {}
};
TEST_F(RealGemma3, HasTransformersTokensOfPrompts) { expect_tokens_of_prompts(); }
TEST_F(RealGemma3, ContinuesAsTransformersDoes) { expect_continuations(); }

}  // namespace
}  // namespace keyhole::tools
