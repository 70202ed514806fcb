// eval and record with a model whose tokens are no bytes: a random one with a trained tokenizer and a chat template.
#include <gtest/gtest.h>

#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/io/trace.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

class TokenModel {
 public:
  TokenModel() {
    json config = small_config();
    config["vocab_size"] = 700;
    config["max_position_embeddings"] = 4096;
    write_model(folder_.path(), config, random_weights(config, ElementType::f32, 11),
                ElementType::f32);
    std::filesystem::copy(KEYHOLE_TOKENIZERS "/llama3.json", folder_ / "tokenizer.json");
    write_file(
        folder_ / "tokenizer_config.json",
        std::string(
            R"({"bos_token": "<s>", "eos_token": "<|end|>", "chat_template":)"
            R"("{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"})"));
  }
  std::vector<std::string> arguments(const std::string& command) const {
    return {command, "--model", folder_.path(), "--device", "host"};
  }
  std::filesystem::path file(const std::string& name) const { return folder_ / name; }

 private:
  TemporaryFolder folder_;
};

TEST(EvalTokens, LengthIsInTokensOfTheModel) {
  const TokenModel model;
  for (const char* task : {"kv", "passkey", "copy"}) {
    const json result = run_json(model.arguments("eval"), {"--task", task, "--length", "1000",
                                                           "--questions", "2", "--index", "exact"});
    EXPECT_LE(result.at("tokens").get<int>(), 1000) << task;
    EXPECT_GE(result.at("tokens").get<int>(), 980) << task;
    EXPECT_EQ(result.at("results").size(), 1U);
  }
}

TEST(EvalTokens, CopyCountsBytesByTokens) {
  const TokenModel model;
  const json result =
      run_json(model.arguments("eval"), {"--task", "copy", "--length", "600", "--questions", "2",
                                         "--index", "exact", "--index", "none"});
  for (const json& row : result.at("results")) {
    EXPECT_EQ(row.at("bytes"), 320);
    EXPECT_LT(row.at("tokens").get<int>(), 320);
    EXPECT_GT(row.at("tokens").get<int>(), 40);
    // A random model spends about log2 of the vocabulary on each token.
    const double bits =
        row.at("bits_per_byte").get<double>() * 320 / row.at("tokens").get<double>();
    EXPECT_GT(bits, 5.0);
    EXPECT_LT(bits, 20.0);
  }
}

TEST(EvalTokens, ATextHasBitsOfTokensAndOfBytes) {
  const TokenModel model;
  const json result = run_json(model.arguments("eval"), {"--task", "text", "--length", "300",
                                                         "--bytes", "100", "--index", "exact"});
  const json& row = result.at("results").at(0);
  const double ratio =
      row.at("bits_per_token").get<double>() / row.at("bits_per_byte").get<double>();
  // Bytes of a token of prose with such a vocabulary.
  EXPECT_GT(ratio, 1.5);
  EXPECT_LT(ratio, 4.0);
}

TEST(EvalTokens, QuestionsAreAskedInAChat) {
  const TokenModel model;
  const json result =
      run_json(model.arguments("eval"), {"--task", "kv", "--length", "800", "--questions", "3",
                                         "--chat", "--answer-tokens", "5", "--index", "exact"});
  EXPECT_EQ(result.at("chat"), true);
  EXPECT_LE(result.at("tokens").get<int>(), 800);
  for (const json& wrong : result.at("results").at(0).at("wrong")) {
    EXPECT_EQ(wrong.at("question").get<std::string>().find("Every line"), 0U);
    EXPECT_EQ(wrong.at("expected").get<std::string>().size(), 5U);
  }
  for (const char* task : {"copy", "text", "kld", "drafts"}) {
    expect_failure(run_keyhole(with(model.arguments("eval"), {"--task", task, "--chat"})), 2,
                   "--chat is of tasks with questions: kv, passkey, needles, variables, words");
  }
  std::filesystem::remove(model.file("tokenizer_config.json"));
  expect_failure(run_keyhole(with(model.arguments("eval"), {"--task", "kv", "--chat"})), 1,
                 "no chat template");
}

TEST(EvalTokens, RecordsTasksAndChats) {
  const TokenModel model;
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--chat"}}) {
    const std::string out = model.file("trace.safetensors");
    const Outcome outcome = run_keyhole(
        with(with(model.arguments("record"), {"--task", "passkey", "--length", "1200", "--queries",
                                              "64", "--training", "32", "--out", out}),
             more));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const Trace trace = Trace::open(out);
    EXPECT_LE(trace.info().tokens, 1200U);
    EXPECT_GE(trace.info().tokens, 1060U);
  }
}

TEST(EvalTokens, DecodesText) {
  const TokenModel model;
  write_file(model.file("prompt"), std::string("The quick brown fox"));
  const json result = run_json(model.arguments("decode"), {"--prompt", model.file("prompt"),
                                                           "--generate", "8", "--index", "exact"});
  EXPECT_LT(result.at("prompt_tokens").get<int>(), 19);
  EXPECT_TRUE(result.contains("generated"));
}

}  // namespace
}  // namespace keyhole::tools
