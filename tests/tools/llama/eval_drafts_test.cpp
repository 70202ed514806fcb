// eval --task drafts with random models: counts and tokens beside those that the reference forward pass gives step by
// step.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/tools/cli/html_data.h"
#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

constexpr size_t kPrompt = 80, kAhead = 3, kTokens = 14;

/// A random model, one that is nearly the same, and a text of one prompt.
class Drafting : public ::testing::Test {
 protected:
  void SetUp() override {
    target_ = random_weights(small_config(), ElementType::f32, 29);
    write_model(new_folder("target"), small_config(), target_, ElementType::f32);
    std::mt19937 random(4);
    draft_ = target_;
    std::normal_distribution<float> noise(0.0F, 0.15F);
    for (auto& [name, tensor] : draft_) {
      for (double& x : tensor.values) x = static_cast<float>(x * (1.0 + noise(random)));
    }
    write_model(new_folder("draft"), small_config(), draft_, ElementType::f32);
    for (size_t i = 0; i < kPrompt; ++i) {
      prompt_.push_back(std::uniform_int_distribution<uint32_t>(2, 36)(random));
    }
    write_file(folder_ / "ids.txt", ids_text(prompt_));
  }

  std::filesystem::path new_folder(const std::string& name) const {
    std::filesystem::create_directory(folder_ / name);
    return folder_ / name;
  }
  [[nodiscard]] std::vector<std::string> arguments(
      const std::string& length = std::to_string(kPrompt),
      const std::string& questions = "1") const {
    return with(eval_of_ids(folder_ / "target", folder_ / "ids.txt", "drafts", length),
                {"--answer-tokens", std::to_string(kTokens), "--ahead", std::to_string(kAhead),
                 "--questions", questions});
  }

  static uint32_t choice(const SyntheticTensors& tensors, const std::vector<uint32_t>& tokens) {
    const std::vector<double> logits = reference_logits(small_config(), tensors, tokens).back();
    return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  /// What the target chooses behind the prompt, token by token.
  [[nodiscard]] std::vector<uint32_t> plain(size_t count) const {
    std::vector<uint32_t> all = prompt_, out;
    while (out.size() < count) {
      out.push_back(choice(target_, all));
      all.push_back(out.back());
    }
    return out;
  }

  TemporaryFolder folder_;
  SyntheticTensors target_, draft_;
  std::vector<uint32_t> prompt_;
};

TEST_F(Drafting, AModelThatDraftsForItselfAcceptsAll) {
  const json result = run_json(arguments(), {"--index", "none", "--index", "flat", "--k", "1000",
                                             "--html", folder_ / "page.html"});
  EXPECT_EQ(result["task"], "drafts");
  EXPECT_EQ(result["tokens"], kPrompt);
  EXPECT_EQ(result["ahead"], kAhead);
  EXPECT_EQ(result["prompts"], 1);
  EXPECT_TRUE(result["draft"].is_null());
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 5U);  // exact, and none and flat of either
  const std::vector<uint32_t> expected = plain(kTokens);
  for (const json& row : rows) {
    const json& text = row["texts"][0];
    const auto accepted = text["accepted"].get<std::vector<size_t>>();
    const size_t sum = std::accumulate(accepted.begin(), accepted.end(), size_t{0});
    EXPECT_EQ(row["rounds"], accepted.size());
    EXPECT_EQ(row["drafted"], kAhead * accepted.size());
    EXPECT_EQ(row["accepted"], sum);
    EXPECT_NEAR(row["mean_accepted"].get<double>() * static_cast<double>(accepted.size()),
                static_cast<double>(sum), 1e-9);
    if (row["of"] != "target" || row["index"] == "flat") {
      EXPECT_EQ(text["tokens"], json(expected)) << row["index"];
      EXPECT_EQ(text["as_plain"], kTokens);
    }
    const bool everything = row["index"] != "none";
    if (everything) {
      EXPECT_EQ(row["accepted"], row["drafted"]) << row["index"] << row["of"];
      EXPECT_EQ(row["accepted_by_place"], json(std::vector<double>(kAhead, 1.0)));
    } else {
      EXPECT_LT(row["accepted"], row["drafted"]) << row["of"];
      EXPECT_LT(row["above_exact"]["mean_accepted"], 0.0);
    }
    EXPECT_EQ(row["bytes_read_per_token"].is_null(), row["of"] == "target");
  }
  EXPECT_EQ(result_in_page(read_file(folder_ / "page.html")), result);
}

TEST_F(Drafting, CountsAreThoseOfTheReference) {
  const json result = run_json(arguments(), {"--draft", folder_ / "draft", "--index", "exact"});
  EXPECT_EQ(result["draft"], "draft");
  ASSERT_EQ(result["results"].size(), 1U);
  const json& row = result["results"][0];
  EXPECT_EQ(row["of"], "both");
  const json& text = row["texts"][0];
  const std::vector<uint32_t> expected = plain(kTokens + kAhead + 1);
  EXPECT_EQ(text["tokens"],
            json(std::vector<uint32_t>(expected.begin(), expected.begin() + kTokens)));

  std::vector<size_t> accepted;
  for (size_t done = 0; done < kTokens;) {
    std::vector<uint32_t> all = prompt_;
    all.insert(all.end(), expected.begin(), expected.begin() + static_cast<ptrdiff_t>(done));
    size_t same = 0;
    for (; same < kAhead; ++same) {
      const uint32_t guess = choice(draft_, all);
      if (guess != expected[done + same]) break;
      all.push_back(guess);
    }
    accepted.push_back(same);
    done += same + 1;
  }
  EXPECT_EQ(text["accepted"], json(accepted));
  // The two models must agree now and then, and not always, or nothing was counted.
  const size_t sum = std::accumulate(accepted.begin(), accepted.end(), size_t{0});
  EXPECT_GT(sum, 0U);
  EXPECT_LT(sum, accepted.size() * kAhead);
}

TEST_F(Drafting, PromptsAreDrawnByTheSeed) {
  const auto args = arguments("64", "3");
  const auto tokens = [&](const char* seed) {
    const json result = run_json(args, {"--seed", seed, "--index", "exact"});
    EXPECT_EQ(result["prompts"], 3);
    std::vector<json> out;
    for (const json& text : result["results"][0]["texts"]) out.push_back(text["tokens"]);
    return out;
  };
  const std::vector<json> one = tokens("1");
  ASSERT_EQ(one.size(), 3U);
  EXPECT_NE(one[0], one[1]);
  EXPECT_EQ(tokens("1"), one);
  EXPECT_NE(tokens("2"), one);
}

TEST_F(Drafting, RefusesOtherTokens) {
  const auto refused = [&](const std::vector<std::string>& args, const std::string& why) {
    expect_failure(run_keyhole(args), 2, why);
  };
  json config = small_config();
  config["vocab_size"] = 700;
  for (const char* name : {"one", "other"}) {
    write_model(new_folder(name), config, random_weights(config, ElementType::f32, 1),
                ElementType::f32);
  }
  refused(with(arguments(), {"--draft", folder_ / "other"}),
          "vocab_size is 700, that of --model 37; allowed: a model with the tokens of --model");
  refused(arguments("81"), "ids.txt has 80 tokens; --length 81 needs 81");
  refused(with(arguments(), {"--audit", "0.5"}), "--audit is of other tasks");
  const std::vector<std::string> two_models = with(arguments(), {"--draft", folder_ / "draft"});
  for (const auto& [option, why] : std::vector<std::pair<std::string, std::string>>{
           {"--gpu-memory", "memory is planned for one model"},
           {"--budgets", "--budgets and --classifiers with --draft: they are of one model's heads"},
           {"--classifiers", "--budgets and --classifiers with --draft"},
           {"--calibration", "--calibration with --draft: it is of one model's heads"}}) {
    SCOPED_TRACE(option);
    refused(with(two_models, {option, option == "--gpu-memory" ? "24GiB" : "file"}), why);
  }
  refused({"eval", "--task", "kv", "--ahead", "4"}, "--draft and --ahead are of --task drafts");

  const std::vector<std::string> args = {"eval",   "--model", folder_ / "one",  "--task",
                                         "drafts", "--draft", folder_ / "other"};
  std::filesystem::copy(KEYHOLE_TOKENIZERS "/llama3.json", folder_ / "one/tokenizer.json");
  refused(args, "it has no tokenizer, and --model has one");
  std::filesystem::copy(KEYHOLE_TOKENIZERS "/qwen.json", folder_ / "other/tokenizer.json");
  refused(args, "; allowed: a model with the tokens of --model");
}

}  // namespace
}  // namespace keyhole::tools
