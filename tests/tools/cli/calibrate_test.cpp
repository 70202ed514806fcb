// calibrate on small traces: what it writes is what the library takes, and meets what was asked for.
#include <gtest/gtest.h>

#include "runtime/files/budgets.h"
#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class Calibrate : public testing::Test {
 protected:
  std::string write_trace(const char* name, const SyntheticShape& shape, unsigned seed) {
    std::mt19937 random(seed);
    const std::string path = folder_ / name;
    make_synthetic_trace(shape, random).write(path);
    return path;
  }
  static SyntheticShape shape() {
    SyntheticShape s;
    s.tokens = 900;
    s.queries = 24;
    return s;
  }
  Outcome calibrate(std::vector<std::string> args) {
    std::vector<std::string> all = {"calibrate",  "--sink", "16",    "--window", "32",
                                    "--kv-dtype", "f32",    "--out", out_};
    all.insert(all.end(), args.begin(), args.end());
    return run_keyhole(all);
  }
  [[nodiscard]] BudgetsFile result() const { return read_budgets(out_); }

  TemporaryFolder folder_;
  std::string out_ = folder_ / "budgets.json";
};

TEST_F(Calibrate, ChoosesForEveryHeadWhatMeetsTheError) {
  const std::string trace = write_trace("a.safetensors", shape(), 5);
  const Outcome outcome = calibrate(
      {"--trace", trace, "--error", "0.2", "--index", "ivf:C=16,probe=2|8|16", "--attend", "topk:4",
       "--attend", "scored", "--tail", "none", "--target", "none", "--cost", "bytes"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("95 % of steps below 0.3"), std::string::npos) << outcome.out;
  const BudgetsFile file = result();
  EXPECT_EQ(file.layers, 5U);
  EXPECT_EQ(file.kv_heads, 2U);
  EXPECT_EQ(file.target.at("error"), 0.2);
  ASSERT_EQ(file.heads.size(), 4U);
  for (uint32_t i = 0; i < 4; ++i) {
    const BudgetsFile::Entry& entry = file.heads[i];
    EXPECT_EQ(entry.layer, i < 2 ? 1U : 4U);  // as the synthetic model has them
    EXPECT_EQ(entry.kv_head, i % 2);
    ASSERT_TRUE(entry.dense);
    if (*entry.dense) continue;
    EXPECT_EQ(entry.index->find("ivf:C=16,probe="), 0U);
    EXPECT_EQ(entry.budget.get(&keyhole_budget::tail), KEYHOLE_TAIL_NONE);
    EXPECT_EQ(entry.budget.get(&keyhole_budget::error_target), 0.0F);
    // compare agrees with what was written of the chosen budget, over all queries.
    const std::string seen = folder_ / "seen.json";
    const keyhole_budget& chosen = entry.budget.values();
    const std::string attend =
        chosen.attend == KEYHOLE_ATTEND_TOPK
            ? "topk:" + std::to_string(chosen.top_k)
            : word_of_number(setting(kBudgetSettings, "attend"), chosen.attend);
    const Outcome compared =
        run_keyhole({"compare", "--trace", trace, "--index", *entry.index, "--attend", attend,
                     "--layers", std::to_string(*entry.layer), "--heads", std::to_string(i % 2),
                     "--sink", "16", "--window", "32", "--kv-dtype", "f32", "--json", seen});
    ASSERT_EQ(compared.exit_code, 0) << compared.err;
    const json row = json::parse(read_file(seen))["results"][0];
    EXPECT_LT(row["output_error"]["p95"].get<double>(), 0.45);
    EXPECT_GT(entry.measured.at("error_p95"), 0.0);
  }
}

// The choice by bytes is determined by the trace alone.
TEST_F(Calibrate, SaysTheSameTwice) {
  const std::string trace = write_trace("a.safetensors", shape(), 8);
  std::vector<std::string> texts;
  for (const char* threads : {"1", "3"}) {
    const Outcome outcome =
        calibrate({"--trace", trace, "--error", "0.1", "--index", "ivf:C=8,probe=2|4", "--attend",
                   "topk:8", "--attend", "weight:0.01", "--tail", "none", "--target", "none",
                   "--cost", "bytes", "--threads", threads});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    BudgetsFile file = result();
    for (BudgetsFile::Entry& entry : file.heads) entry.measured.erase("us");
    texts.push_back(budgets_text(file));
  }
  EXPECT_EQ(texts[0], texts[1]);
}

TEST_F(Calibrate, ALooseErrorIsCheaperThanAStrictOne) {
  const std::string a = write_trace("a.safetensors", shape(), 6);
  const std::string b = write_trace("b.safetensors", shape(), 7);
  double last = 0;
  for (const char* error : {"0.5", "0.1", "0.001"}) {
    const Outcome outcome =
        calibrate({"--trace", a,          "--trace",  b,          "--error", error,      "--index",
                   "flat",    "--attend", "topk:4",   "--attend", "topk:32", "--attend", "topk:300",
                   "--tail",  "none",     "--target", "none",     "--cost",  "bytes"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    double bytes = 0;
    for (const BudgetsFile::Entry& entry : result().heads) bytes += entry.measured.at("bytes");
    EXPECT_GE(bytes, last) << error;
    last = bytes;
  }
}

TEST_F(Calibrate, WhereNothingMeetsItTheHeadIsExactOrAWarningIsGiven) {
  const std::string trace = write_trace("a.safetensors", shape(), 9);
  const std::vector<std::string> common = {
      "--trace", trace,    "--error", "1e-4",     "--index", "ivf:C=32,probe=1", "--attend",
      "topk:1",  "--tail", "none",    "--target", "none",    "--cost",           "bytes"};
  Outcome outcome = calibrate(common);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const BudgetsFile::Entry& entry : result().heads) {
    EXPECT_EQ(entry.dense, true);
    EXPECT_LT(entry.measured.at("error_p95"), 1e-4);
  }
  EXPECT_EQ(outcome.out.find("warning"), std::string::npos) << outcome.out;
  auto no_dense = common;
  no_dense.emplace_back("--no-dense");
  outcome = calibrate(no_dense);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const BudgetsFile::Entry& entry : result().heads) {
    EXPECT_EQ(entry.dense, false);
    EXPECT_EQ(entry.index, "ivf:C=32,probe=1");
  }
  EXPECT_NE(outcome.out.find("warning: nothing that was tried"), std::string::npos) << outcome.out;
}

TEST_F(Calibrate, SearchesTheTargetThatMeetsTheError) {
  const std::string trace = write_trace("a.safetensors", shape(), 10);
  const Outcome outcome =
      calibrate({"--trace", trace, "--error", "0.3", "--require", "p90", "--index",
                 "ivf:C=16,probe=2", "--attend", "topk:4", "--tail", "second:8", "--target",
                 "search", "--cost", "bytes", "--no-dense"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const BudgetsFile file = result();
  for (const BudgetsFile::Entry& entry : file.heads) {
    EXPECT_EQ(entry.budget.get(&keyhole_budget::tail), KEYHOLE_TAIL_SECOND);
    EXPECT_GT(*entry.budget.get(&keyhole_budget::error_target), 0.0F);
    EXPECT_LT(*entry.budget.get(&keyhole_budget::error_target), 1.0F);
  }
  EXPECT_EQ(file.tail_partition, 8U);
}

TEST_F(Calibrate, ChecksWithAnotherTrace) {
  const std::string a = write_trace("a.safetensors", shape(), 11);
  SyntheticShape other = shape();
  other.tokens = 700;
  const std::string b = write_trace("b.safetensors", other, 12);
  const Outcome outcome =
      calibrate({"--trace", a, "--check", b, "--error", "0.3", "--index", "flat", "--attend",
                 "topk:64", "--tail", "none", "--target", "none", "--layers", "4"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  ASSERT_EQ(result().heads.size(), 2U);
  EXPECT_EQ(result().heads[0].layer, 4U);
}

TEST_F(Calibrate, ThePlanTakesTheFile) {
  const std::string trace = write_trace("a.safetensors", shape(), 5);
  ASSERT_EQ(calibrate({"--trace", trace, "--error", "0.2", "--index", "ivf:C=16,probe=4",
                       "--attend", "scored", "--tail", "none", "--target", "none"})
                .exit_code,
            0);
  const std::vector<std::string> shape_options = {"--layers",   "5",  "--heads",    "4",
                                                  "--kv-heads", "2",  "--head-dim", "64",
                                                  "--context",  "8k", "--budgets",  out_};
  std::vector<std::string> args = {"plan"};
  args.insert(args.end(), shape_options.begin(), shape_options.end());
  Outcome outcome = run_keyhole(args);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find(out_), std::string::npos) << outcome.out;
  args[2] = "3";  // layers
  outcome = run_keyhole(args);
  expect_failure(outcome, 2, "layers 5");
}

TEST_F(Calibrate, RefusesWhatCannotBe) {
  const std::string trace = write_trace("a.safetensors", shape(), 5);
  SyntheticShape wide = shape();
  wide.dim = 128;
  const std::string other = write_trace("b.safetensors", wide, 5);
  const std::vector<std::vector<std::string>> wrong = {
      {"--trace", trace, "--error", "0"},
      {"--trace", trace, "--error", "1.5"},
      {"--trace", trace, "--require", "mean"},
      {"--trace", trace, "--index", "ivf:probes=3"},
      {"--trace", trace, "--attend", "best"},
      {"--trace", trace, "--tail", "third"},
      {"--trace", trace, "--tail", "mean:8", "--tail", "second:16"},
      {"--trace", trace, "--target", "search", "--target", "search"},
      {"--trace", trace, "--layers", "7"},
      {"--trace", trace, "--trace", other},
      {"--trace", trace, "--check", other},
      {"--trace", trace, "--task", "kv"},
      {"--trace", trace, "--sink", "2000"},
      {"--trace", trace, "--cost", "money"},
  };
  for (const auto& args : wrong) {
    const Outcome outcome = calibrate(args);
    EXPECT_EQ(outcome.exit_code, 2) << args[2] << ": " << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(out_));
  }
  EXPECT_EQ(calibrate({"--trace", folder_ / "nothing"}).exit_code, 1);
}

}  // namespace
}  // namespace keyhole::tools
