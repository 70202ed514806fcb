// eval's ways to compare with (K and V in 8 and 4 bits), what is lost and won, and the task copy; from outside, with
// the bundled model.
#include <gtest/gtest.h>

#include <cstdint>

#include "runtime/files/json.h"
#include "tests/tools/cli/html_data.h"
#include "tests/tools/llama/run_json.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

TEST(EvalCommand, PutsRoundedCachesBesideExactAttention) {
  const json result =
      run_json({"eval",     "--task",  "kv",     "--length", "1200",   "--questions", "12",
                "--window", "64",      "--sink", "16",       "--seed", "5",           "--index",
                "none",     "--index", "full",   "--index",  "q8_0",   "--index",     "q4_0"});
  EXPECT_EQ(result["seed"], 5);
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 4U);
  const json& none = rows[0];
  const json& full = rows[1];
  EXPECT_GE(full["correct"], 11);
  EXPECT_EQ(full["lost"], 0);
  EXPECT_EQ(full["won"], 0);
  // What is lost and won makes the difference of the totals.
  for (const json& row : rows) {
    EXPECT_EQ(row["correct"].get<int>(),
              full["correct"].get<int>() - row["lost"].get<int>() + row["won"].get<int>());
  }
  EXPECT_GE(none["lost"], 8);
  EXPECT_EQ(full["bytes_read_per_token"], 0.0);
  for (size_t i = 2; i < 4; ++i) {
    const json& row = rows[i];
    EXPECT_GE(row["correct"], 10) << row["index"];
    EXPECT_TRUE(row["tokens_per_second"].is_null());  // Keyhole has no such cache to time
    EXPECT_TRUE(row["bytes_read_per_token"].is_null());
    EXPECT_EQ(row["kv_format"]["name"], row["index"]);
    EXPECT_EQ(row["kv_format"]["bits"], i == 2 ? 8.5 : 4.5);
    // 6 layers, K and V, 2 KV heads of 128; 34 or 18 bytes for 32 numbers.
    EXPECT_EQ(row["kv_format"]["bytes"],
              result["tokens"].get<uint64_t>() * 6 * 2 * 2 * 128 / 32 * (i == 2 ? 34 : 18));
  }
  const Outcome outcome = run_keyhole({"eval", "--task", "kv", "--length", "600", "--questions",
                                       "2", "--seed", "77", "--index", "exact", "--index", "q4_0"});
  for (const char* part : {"seed 77", "lost / won", "4.5 bits a number"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(EvalCommand, PutsCachesWhoseTokensAgeBesideExactAttention) {
  const TemporaryFolder folder;
  const std::string trace = folder / "calibration.safetensors";
  const Outcome recorded = run_keyhole({"record", "--task", "kv", "--length", "700", "--queries",
                                        "32", "--seed", "9", "--training", "64", "--out", trace});
  ASSERT_EQ(recorded.exit_code, 0) << recorded.err;
  const std::vector<std::string> args = {"eval", "--task",   "kld", "--length", "720", "--bytes",
                                         "20",   "--window", "64",  "--sink",   "16",  "--index"};
  const json result =
      run_json(with(args, {"none", "--index", "kivi4", "--index", "kivi2", "--index", "kvarn_k4v2",
                           "--index", "kvarn2", "--index", "oscar2", "--calibration", trace,
                           "--html", folder / "page.html"}));
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 7U);
  const double none = rows[1]["kld"]["mean"];
  // Heads of 128: KIVI's 32 bits of 32 numbers; KVarN's 32 of 128 and 16 of 128; OSCAR's 32 of 128.
  const double bits[] = {0, 0, 5, 3, 3.375, 2.375, 2.25};
  for (size_t i = 2; i < rows.size(); ++i) {
    const json& row = rows[i];
    SCOPED_TRACE(row["index"]);
    EXPECT_EQ(row["kv_format"]["name"], row["index"]);
    EXPECT_EQ(row["kv_format"]["bits"], bits[i]);
    const double all = row["kv_format"]["bits_in_all"];
    EXPECT_GT(all, bits[i]);  // some tokens are in 16 bits
    EXPECT_LT(all, 15);
    EXPECT_NEAR(row["kv_format"]["bytes"].get<double>(), all / 8 * 720 * 6 * 2 * 2 * 128, 1);
    EXPECT_GT(row["kld"]["mean"], 1e-7);
    EXPECT_LT(row["kld"]["mean"], none);
    EXPECT_TRUE(row["tokens_per_second"].is_null());
  }
  EXPECT_LT(rows[2]["kld"]["mean"], rows[3]["kld"]["mean"]) << "4 bits, 2 bits";
  EXPECT_NE(read_file(folder / "page.html").find("bits a number"), std::string::npos);

  // A trace that is missing, that is not there, or another model's.
  const auto refused = [&](const std::vector<std::string>& more, const char* why) {
    const Outcome outcome = run_keyhole(with(args, with({"oscar2"}, more)));
    EXPECT_NE(outcome.exit_code, 0);
    EXPECT_NE(outcome.err.find(why), std::string::npos) << outcome.err;
  };
  refused({}, "--calibration is missing; needed: a trace of this model");
  refused({"--calibration", folder / "nothing"}, "nothing");
  const std::string other = folder / "other.safetensors";
  ASSERT_EQ(run_keyhole({"record", "--model", KEYHOLE_SOURCE_MODEL, "--task", "kv", "--length",
                         "700", "--queries", "32", "--out", other})
                .exit_code,
            0);
  refused({"--calibration", other}, "is of the model 'model'; needed: a trace of 'bundled'");
  expect_failure(run_keyhole(with(args, {"kivi2", "--calibration", trace})), 2,
                 trace + ": no --index is fitted to it; allowed with --index oscar2");
  expect_failure(run_keyhole({"decode", "--prompt", "x", "--calibration", trace}), 2,
                 trace + ": no --index is fitted to it; allowed with --index oscar2");
}

TEST(EvalCommand, CopiesPassages) {
  const TemporaryFolder folder;
  const std::vector<std::string> args = {"eval",     "--task",      "copy",   "--length", "1024",
                                         "--window", "64",          "--sink", "16",       "--seed",
                                         "3",        "--questions", "2"};
  const json result =
      run_json(with(args, {"--index", "none", "--index", "exact", "--index", "q8_0", "--index",
                           "flat", "--k", "2000", "--html", folder / "page.html"}));
  const std::string page = read_file(folder / "page.html");
  EXPECT_EQ(result_in_page(page), result);
  EXPECT_EQ(drawn_bars(page).size(), 4U);
  EXPECT_EQ(result["tokens"], 1024);
  EXPECT_EQ(result["seed"], 3);
  EXPECT_EQ(result["passage_bytes"], 160);
  EXPECT_EQ(result["cue_bytes"], 24);
  EXPECT_EQ(result["passage_places"].size(), 2U);
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 4U);
  const json& none = rows[0];
  const json& exact = rows[1];
  EXPECT_GT(exact["share_right"], 0.75);
  EXPECT_GT(exact["after_cue"]["share_right"], 0.85);  // from there on it knows where to look
  EXPECT_LT(exact["after_cue"]["bits_per_byte"], exact["bits_per_byte"]);
  EXPECT_LT(none["share_right"], exact["share_right"].get<double>() - 0.1);
  EXPECT_GT(none["above_exact"]["bits_per_byte"], 0.5);
  EXPECT_GT(none["above_exact"]["standard_error"], 0.0);
  for (const json& row : rows) {
    EXPECT_EQ(row["bytes"], 2 * 160);
    int right = 0;
    double bits = 0.0;
    for (const int r : row["right_by_passage"]) right += r;
    for (const double b : row["bits_by_passage"]) bits += b / 2;
    EXPECT_EQ(row["bytes_right"], right);
    EXPECT_NEAR(row["bits_per_byte"].get<double>(), bits, 1e-9);
    EXPECT_EQ(right,
              exact["bytes_right"].get<int>() - row["lost"].get<int>() + row["won"].get<int>());
    EXPECT_NEAR(row["above_exact"]["bits_per_byte"].get<double>(),
                bits - exact["bits_per_byte"].get<double>(), 1e-9);
  }
  // 8 bits are nearly as good as exact; an index that finds every key is exact.
  EXPECT_NEAR(rows[2]["bits_per_byte"].get<double>(), exact["bits_per_byte"].get<double>(), 0.02);
  EXPECT_NE(rows[2]["bits_per_byte"], exact["bits_per_byte"]);
  EXPECT_NEAR(rows[3]["bits_per_byte"].get<double>(), exact["bits_per_byte"].get<double>(), 0.01);
}

TEST(EvalCommand, CopiesWithoutExactAttentionToCompareWith) {
  const std::vector<std::string> args = {"eval",   "--task",   "copy",        "--length", "512",
                                         "--seed", "3",        "--questions", "1",        "--index",
                                         "none",   "--window", "64"};
  const json alone = run_json(args)["results"][0];
  EXPECT_TRUE(alone["lost"].is_null());
  EXPECT_TRUE(alone["won"].is_null());
  EXPECT_FALSE(alone.contains("above_exact"));
  const Outcome outcome = run_keyhole(args);
  for (const char* part :
       {"bytes right", "bits/byte", "after cue", "passages of 160 bytes, seed 3"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(DecodeCommand, AttendsToARoundedCache) {
  const std::vector<std::string> args = {"decode",     "--task", "kv",      "--length", "1000",
                                         "--generate", "6",      "--index", "q8_0"};
  const json result = run_json(args);
  EXPECT_EQ(result["index"], "q8_0");
  EXPECT_EQ(result["correct"], true);
  EXPECT_NE(run_keyhole(args).out.find("through q8_0 and back"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
