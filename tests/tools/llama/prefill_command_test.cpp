// Patterns of prompts from outside: prefill, calibrate --prefill, and decode by what that wrote.
#include <gtest/gtest.h>

#include <random>

#include "runtime/files/budgets.h"
#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

/// A small random model with a prompt of so many token ids, in files.
class ModelFiles {
 public:
  explicit ModelFiles(size_t tokens) {
    write_model(folder_.path(), small_config(),
                random_weights(small_config(), ElementType::f32, 23), ElementType::f32);
    std::mt19937 random(3);
    std::string ids;
    for (size_t i = 0; i < tokens; ++i) {
      ids += std::to_string(std::uniform_int_distribution<uint32_t>(0, 36)(random)) + " ";
    }
    write_file(folder_ / "ids.txt", ids);
  }
  [[nodiscard]] std::vector<std::string> arguments(const std::string& command) const {
    return {command,    "--model", folder_.path(), "--tokens", folder_ / "ids.txt",
            "--device", "host"};
  }
  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return folder_ / name; }

 private:
  TemporaryFolder folder_;
};

TEST(PrefillCommand, MeasuresPatternsBesideDenseAttention) {
  const ModelFiles model(4100);
  const auto layers = small_config()["num_hidden_layers"].get<size_t>();
  const json out =
      run_json(model.arguments("prefill"),
               {"--pattern", "a-shape:first=64,near=256|99999", "--csv", model.file("out.csv")});
  EXPECT_EQ(out["tokens"], 4100);
  const json& patterns = out["patterns"];
  ASSERT_EQ(patterns.size(), 3U);
  EXPECT_EQ(patterns[0]["pattern"], "dense");
  EXPECT_EQ(patterns[0]["blocks"], 1.0);
  EXPECT_TRUE(patterns[0]["errors"].empty());
  for (const size_t i : {1, 2}) {
    ASSERT_EQ(patterns[i]["errors"].size(), layers - 1);
    EXPECT_EQ(patterns[i]["errors"][0]["layer"], 0);
    EXPECT_GT(patterns[i]["first_token_s"], 0.0);
    EXPECT_LE(patterns[i]["stages"]["attention_s"], patterns[i]["first_token_s"]);
  }
  EXPECT_LT(patterns[1]["blocks"], 0.3);
  EXPECT_GT(patterns[1]["errors"][0]["p95"], patterns[1]["errors"][0]["p50"]);
  EXPECT_GT(patterns[1]["errors"][0]["p50"], 1e-3);
  EXPECT_EQ(patterns[2]["blocks"], 1.0);  // all that queries see
  EXPECT_LT(patterns[2]["errors"][0]["p95"], 1e-5);
  EXPECT_TRUE(patterns[2]["same_token"]);
  // In chunks of whole tiles blocks are chosen alike; dense attention is then the library's.
  const json chunked = run_json(model.arguments("prefill"),
                                {"--pattern", "a-shape:first=64,near=256", "--chunk", "1024"});
  EXPECT_EQ(chunked["chunk"], 1024);
  EXPECT_EQ(chunked["patterns"][1]["blocks"], patterns[1]["blocks"]);
  EXPECT_EQ(chunked["patterns"][1]["same_token"], patterns[1]["same_token"]);
  for (const char* quantile : {"p50", "p95"}) {
    const double whole = patterns[1]["errors"][0][quantile];
    EXPECT_NEAR(chunked["patterns"][1]["errors"][0][quantile].get<double>(), whole, 1e-4 * whole);
  }
  const std::string csv = read_file(model.file("out.csv"));
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), static_cast<long>(2 + 2 * (layers - 1)));
  EXPECT_NE(csv.find("\"a-shape:first=64,near=256\","), std::string::npos) << csv;
}

TEST(PrefillCommand, MeasuresALaterTurn) {
  const ModelFiles model(700);
  const json out = run_json(model.arguments("prefill"),
                            {"--turn", "200", "--pattern", "a-shape:first=64,near=64|99999"});
  EXPECT_EQ(out["tokens"], 700);
  EXPECT_EQ(out["turn"], 200);
  const json& patterns = out["patterns"];
  ASSERT_EQ(patterns.size(), 3U);
  EXPECT_EQ(patterns[0]["pattern"], "dense");
  // Tiles at 500 and 628 see 10 and 11 blocks: number 0, and from number 6 and number 8 on.
  const double blocks = (1.0 + 4.0 + 1.0 + 3.0) / (10.0 + 11.0);
  EXPECT_NEAR(patterns[1]["blocks"].get<double>(), blocks, 1e-9);
  EXPECT_EQ(patterns[2]["blocks"], 1.0);
  EXPECT_TRUE(patterns[2]["same_token"]);
  for (const json& p : patterns) {
    EXPECT_GT(p["first_token_s"], 0.0);
    EXPECT_TRUE(p["errors"].empty());
  }
  expect_failure(run_keyhole(with(model.arguments("prefill"), {"--turn", "700"})), 2,
                 "--turn is 700; allowed: fewer than the prompt's 700 tokens");
}

TEST(PrefillCommand, SaysWhatIsWrong) {
  const ModelFiles model(4000);
  const auto refusal = [&](const std::vector<std::string>& more) {
    const Outcome outcome = run_keyhole(with(model.arguments("prefill"), more));
    EXPECT_EQ(outcome.exit_code, 2);
    return outcome.err;
  };
  EXPECT_NE(
      refusal({}).find("the prompt has 4000 tokens; patterns are of prompts of more than 4096"),
      std::string::npos);
  EXPECT_NE(refusal({"--json", "-", "--csv", "-"}).find("cannot both"), std::string::npos);
  expect_failure(run_keyhole({"calibrate", "--prefill", "--index", "flat", "--out", "-"}), 2,
                 "--index is of decoding, and --prefill of prompts");
  expect_failure(run_keyhole({"calibrate", "--pattern", "dense", "--out", "-"}), 2,
                 "--pattern is of --prefill");
  expect_failure(
      run_keyhole(with(model.arguments("decode"), {"--index", "exact", "--prefill", "budgets"})), 2,
      "--prefill budgets: needed: --budgets FILE");
}

TEST(PrefillCommand, TakesWhatCalibrateHasChosen) {
  const TemporaryFolder folder;
  const std::string path = folder / "patterns.json";
  const Outcome made =
      run_keyhole({"calibrate", "--prefill", "--task", "kv", "--length", "2048", "--error", "0.1",
                   "--require", "p95", "--pattern", "a-shape:first=64,near=256", "--pattern",
                   "sampled:mass=900|980,from=0", "--out", path});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const BudgetsFile file = read_budgets(path);
  ASSERT_EQ(file.heads.size(), size_t{file.layers - 1} * file.q_heads);
  bool sparse = false;
  for (size_t i = 0; i < file.heads.size(); ++i) {
    const BudgetsFile::Entry& entry = file.heads[i];
    EXPECT_EQ(entry.layer, i / file.q_heads);
    EXPECT_EQ(entry.q_head, i % file.q_heads);
    ASSERT_TRUE(entry.pattern);
    sparse = sparse || *entry.pattern != "dense";
    EXPECT_LE(entry.measured.at("blocks"), 1.0);
    EXPECT_LE(entry.measured.at("mass"), 1.0);
  }
  EXPECT_TRUE(sparse);
  const json decoded =
      run_json({"decode", "--device", "host", "--task", "kv", "--length", "4400", "--generate", "1",
                "--index", "flat", "--prefill", "budgets", "--budgets", path});
  EXPECT_EQ(decoded["prefill"], "budgets:" + path);
  EXPECT_LT(decoded["prefill_share"], 0.9);
}

}  // namespace
}  // namespace keyhole::tools
