// eval --task kld beside a file of log-probabilities that the test makes from the reference forward pass.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <optional>
#include <random>

#include "tests/tools/cli/html_data.h"
#include "tests/tools/io/kld_base_writer.h"
#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

constexpr uint32_t kBaseContext = 141, kBaseChunks = 3;
constexpr size_t kBasePrompt = 70, kBaseRows = 70;

/// A random model, and a file of what the reference predicts for chunks of random tokens.
class KldBase : public ::testing::Test {
 protected:
  void SetUp() override { make(small_config()); }

  void make(const json& config) {
    tensors_ = random_weights(config, ElementType::f32, 29);
    // Predictions that differ: those of random weights are nearly alike.
    for (double& x : tensors_.at("lm_head.weight").values) x *= 8.0;
    write_model(folder_.path(), config, tensors_, ElementType::f32);
    std::mt19937 random(4);
    numbers_ = {kBaseContext, config["vocab_size"].get<uint32_t>(), kBaseChunks, {}, {}};
    for (uint32_t i = 0; i < kBaseContext * kBaseChunks; ++i) {
      numbers_.tokens.push_back(std::uniform_int_distribution<uint32_t>(2, 36)(random));
    }
    config_ = config;
  }

  /// The tokens of a chunk, the first one replaced where `front` is given.
  [[nodiscard]] std::vector<uint32_t> chunk(uint32_t c, std::optional<uint32_t> front = {}) const {
    const auto begin = numbers_.tokens.begin() + c * kBaseContext;
    std::vector<uint32_t> tokens(begin, begin + kBaseContext);
    if (front) tokens.front() = *front;
    return tokens;
  }

  void write_base(std::optional<uint32_t> front = {}) {
    numbers_.logits.clear();
    for (uint32_t c = 0; c < kBaseChunks; ++c) {
      const auto logits = reference_logits(config_, tensors_, chunk(c, front));
      for (size_t i = 0; i < kBaseRows; ++i) numbers_.logits.push_back(logits[kBasePrompt + i]);
    }
    write_file(folder_ / "base.kld", kld_base_bytes(numbers_));
  }

  /// Mean bits of the successors in the first `chunks` chunks by the reference, where logits count as no more than
  /// `cut` below the largest.
  [[nodiscard]] double reference_bits(uint32_t chunks, double cut = 1e9) const {
    double sum = 0.0;
    for (uint32_t c = 0; c < chunks; ++c) {
      for (size_t i = 0; i < kBaseRows; ++i) {
        const std::vector<double>& row = numbers_.logits[c * kBaseRows + i];
        const double logit = row[numbers_.tokens[c * kBaseContext + kBasePrompt + i + 1]];
        const double least = *std::max_element(row.begin(), row.end()) - cut;
        sum += log_sum_of(row) - std::max(logit, least);
      }
    }
    return sum / std::log(2.0) / static_cast<double>(chunks * kBaseRows);
  }

  /// On the host in fp32, with a sink and a window that the prompts leave.
  [[nodiscard]] std::vector<std::string> arguments() const {
    return {"eval",
            "--model",
            folder_.path(),
            "--task",
            "kld",
            "--base",
            folder_ / "base.kld",
            "--window",
            "16",
            "--sink",
            "4",
            "--kv-dtype",
            "f32",
            "--device",
            "host"};
  }

  TemporaryFolder folder_;
  SyntheticTensors tensors_;
  json config_;
  KldBaseNumbers numbers_;
};

double kld_mean(const json& row) { return row["kld"]["mean"].get<double>(); }

TEST_F(KldBase, HoldsEveryWayAgainstTheFile) {
  write_base();
  const json result = run_json(arguments(), {"--index", "none", "--index", "q4_0", "--chunks", "2",
                                             "--html", folder_ / "page.html"});
  EXPECT_EQ(result["base"]["file"], (folder_ / "base.kld").string());
  EXPECT_EQ(result["base"]["context"], kBaseContext);
  EXPECT_EQ(result["base"]["vocabulary"], 37);
  EXPECT_EQ(result["base"]["chunks"], 2);
  EXPECT_EQ(result["base"]["chunks_in_file"], kBaseChunks);
  EXPECT_EQ(result["decoded"], 2 * kBaseRows);
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0]["index"], "exact");
  // The file is what exact attention of the reference predicts, in steps of at most 16 / 65535.
  EXPECT_LT(std::abs(rows[0]["kld"]["largest"].get<double>()), 2.5e-4);
  EXPECT_LT(std::abs(kld_mean(rows[0])), 3e-5);
  EXPECT_GT(rows[0]["same_best"].get<double>(), 0.99);
  EXPECT_NEAR(rows[0]["bits_per_token"].get<double>(), reference_bits(2), 1e-4);
  EXPECT_NEAR(result["base"]["bits_per_token"].get<double>(), reference_bits(2, 16.0), 5e-4);
  EXPECT_FALSE(rows[0].contains("above_exact"));
  // Of a way, what plain kld finds over the same tokens.
  std::vector<double> plain(3);
  for (uint32_t c = 0; c < 2; ++c) {
    write_file(folder_ / "ids.txt", ids_text(chunk(c)));
    const json alone = run_json(
        eval_of_ids(folder_.path(), folder_ / "ids.txt", "kld", std::to_string(kBasePrompt)),
        {"--bytes", std::to_string(kBaseRows), "--index", "none", "--index", "q4_0"});
    for (size_t row = 0; row < 3; ++row) plain[row] += kld_mean(alone["results"][row]) / 2;
  }
  for (const size_t row : {1U, 2U}) {
    EXPECT_GT(plain[row], 1e-3);
    EXPECT_NEAR(kld_mean(rows[row]), plain[row], 1e-4) << row;
    EXPECT_TRUE(rows[row].contains("above_exact"));
    EXPECT_EQ(rows[row]["kld_by_position"].size(), 32U);
  }
  EXPECT_EQ(result_in_page(read_file(folder_ / "page.html")), result);
  // Without --chunks, all.
  const Outcome text = run_keyhole(with(arguments(), {"--index", "none"}));
  for (const char* part : {"base.kld, 3 of 3 chunks of 141 tokens, 210 tokens decoded",
                           "distribution from the file's", "base: "}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
  }
}

TEST_F(KldBase, TheVocabularysFirstTokenTakesThePlaceOfAChunks) {
  json config = small_config();
  config["vocab_size"] = 700;
  make(config);
  std::filesystem::copy(KEYHOLE_TOKENIZERS "/llama3.json", folder_ / "tokenizer.json");
  const auto exact = [&] { return run_json(arguments(), {"--index", "exact"})["results"][0]; };
  write_base();
  EXPECT_GT(exact()["kld"]["mean"], 1e-3) << "made without it";
  write_base(0);
  EXPECT_LT(std::abs(kld_mean(exact())), 3e-5);
}

TEST_F(KldBase, ASignalEndsTheWorkBehindAWholeChunk) {
  constexpr uint32_t kMany = 2000;
  const std::vector<uint32_t> once = numbers_.tokens;
  while (numbers_.tokens.size() < size_t{kMany} * kBaseContext) {
    numbers_.tokens.insert(numbers_.tokens.end(), once.begin(), once.end());
  }
  numbers_.tokens.resize(size_t{kMany} * kBaseContext);
  numbers_.chunks = kMany;
  numbers_.logits.assign(size_t{kMany} * kBaseRows, std::vector<double>(37));
  write_file(folder_ / "base.kld", kld_base_bytes(numbers_));
  const std::string out = folder_ / "cut.json";
  Command command(with(arguments(), {"--index", "none", "--json", out}), {},
                  Command::Output::terminal);
  (void)command.expect(" of 2000 ");  // shown when it has taken two seconds
  command.interrupt(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGTERM);
  const json result = json::parse(read_file(out));
  const uint32_t chunks = result["base"]["chunks"];
  EXPECT_GT(chunks, 0U);
  EXPECT_LT(chunks, kMany);
  EXPECT_EQ(result["decoded"], chunks * kBaseRows);
  // The file says that all tokens are alike.
  EXPECT_NEAR(result["base"]["bits_per_token"].get<double>(), std::log2(37.0), 1e-5);
}

TEST_F(KldBase, NamesWhatDoesNotFit) {
  write_base();
  const auto refused = [&](const std::vector<std::string>& more, const std::string& why) {
    expect_failure(run_keyhole(with(arguments(), more)), 2, why);
  };
  write_file(folder_ / "ids.txt", "5 6");
  for (const auto& [option, value] : {std::pair<std::string, std::string>{"--length", "64"},
                                      {"--bytes", "10"},
                                      {"--prompt", folder_ / "ids.txt"},
                                      {"--tokens", folder_ / "ids.txt"}}) {
    refused({option, value}, "--base and " + option + ": one of them is allowed");
  }
  refused({"--bins", "2"}, "--bins is of --task kld without --base");
  refused({"--audit", "0.1"}, "--audit is of --task kld without --base");
  refused({"--chunks", "4"}, "--chunks is 4; allowed: at most the 3 of");
  const std::string base = folder_ / "base.kld";
  expect_failure(run_keyhole({"eval", "--task", "kld", "--chunks", "4"}), 2,
                 "--chunks is of --base");
  expect_failure(run_keyhole({"eval", "--task", "text", "--base", base}), 2,
                 "--base and --chunks are of --task kld");
  expect_failure(run_keyhole({"eval", "--task", "kld", "--base", base}), 2,
                 "is of a vocabulary of 37 tokens, the model has ");
  const std::string bytes = read_file(base);
  write_file(folder_ / "base.kld", bytes.substr(0, bytes.size() - 1));
  expect_failure(run_keyhole(arguments()), 1, "it was cut, or not written to its end");
}

}  // namespace
}  // namespace keyhole::tools
