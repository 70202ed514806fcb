#include <gtest/gtest.h>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

const std::vector<std::string> kSmall = {
    "bench-step", "--layers", "2",  "--q-heads", "4", "--kv-heads",
    "2",          "--steps",  "4",  "--warmup",  "2", "--sink",
    "16",         "--window", "64", "--threads", "2"};

std::vector<std::string> with(std::vector<std::string> args, const std::string& device = "host") {
  args.insert(args.begin(), kSmall.begin(), kSmall.end());
  args.insert(args.end(), {"--device", device});
  return args;
}

json bench(std::vector<std::string> args) {
  args.insert(args.end(), {"--json", "-"});
  const Outcome outcome = run_keyhole(with(std::move(args)));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  return json::parse(outcome.out);
}

const std::vector<std::string> kSynthetic = {"--synthetic", "--context", "2k", "--head-dim", "64"};

std::vector<std::string> synthetic(std::vector<std::string> args) {
  args.insert(args.begin(), kSynthetic.begin(), kSynthetic.end());
  return args;
}

TEST(BenchStep, OffloadedTokensInInt8TakeLessHostMemory) {
  const auto bytes = [](const char* how) {
    const json out = bench(synthetic({"--index", "flat", "--kv-host", how}));
    EXPECT_EQ(out["options"]["kv_host"], how);
    return out["results"][0]["statistics"]["host_bytes"].get<uint64_t>();
  };
  // 2048 tokens of 2 layers and 2 heads of 64 components: 1 MiB each of K and V in 16 bits.
  EXPECT_GT(bytes("same"), bytes("int8") + 1500000 / 2);
}

TEST(BenchStep, MeasuresEveryIndexWithEveryBudget) {
  const json out =
      bench(synthetic({"--index", "flat", "--index", "ivf:C=32,probe=4", "--attend", "topk:20",
                       "--attend", "scored", "--compare", "full,resident,pcie,q8_0"}));
  EXPECT_EQ(out["options"]["context"], 2048);
  EXPECT_EQ(out["options"]["steps_in"], "host");
  EXPECT_EQ(out["options"]["data"], "synthetic");
  EXPECT_EQ(out["floors"]["layer_bytes"], 2 * 2 * 2048 * 2 * 64);
  EXPECT_GT(out["phases_s"]["prefill"], 0);
  const json& results = out["results"];
  ASSERT_EQ(results.size(), 8U);
  EXPECT_EQ(results[7]["name"], "q8_0 on the card (floor)");
  for (const json& r : results) {
    EXPECT_EQ(r["floor"], &r == &results[7]);
    EXPECT_EQ(r["busy_bytes_per_second"], nullptr);
    if (r["name"] == "K and V over PCIe" || r["floor"]) {
      EXPECT_EQ(r["layer_us"], nullptr);
      EXPECT_NE(r["note"], "");
      continue;
    }
    EXPECT_GT(r["layer_us"]["p50"], 0);
    EXPECT_LE(r["layer_us"]["p50"], r["layer_us"]["p99"]);
    EXPECT_GE(r["token_us"]["p50"], r["layer_us"]["p50"]);
    EXPECT_GT(r["tokens_per_second"], 0);
    EXPECT_EQ(r["statistics"]["attends"], 4 * 2);  // steps x layers: the warm-up does not count
    EXPECT_EQ(r["comparison"], r["index"] == "");
  }
  // What a search is asked for shows in what it reads: nothing without one.
  EXPECT_GT(results[0]["statistics"]["bytes_read"], results[2]["statistics"]["bytes_read"]);
  EXPECT_EQ(results[4]["statistics"]["bytes_read"], 0);
  EXPECT_GT(results[0]["build_s"], 0);
  EXPECT_EQ(results[1]["build_s"], 0);  // shares the first one's
  EXPECT_GT(results[2]["build_s"], 0);
}

TEST(BenchStep, ARunFileHasBudgetsOfItsOwnForEachIndex) {
  const TemporaryFolder folder;
  const std::string path = folder / "runs.json";
  const auto write = [&](const std::string& rest) {
    write_file(path, R"({"format": "keyhole-runs", "version": 1, )" + rest);
  };
  write(R"("options": {"steps": 3, "warmup": 1, "audit_steps": 2}, "attend": ["topk:20"],
    "runs": [{"index": "codes", "attend": ["topk"]},
             {"index": "ivf:C=32", "query_args": {"probe": [2, 4]}, "tail": ["none", "second"]}]})");
  const json out = bench(synthetic({"--runs", path, "--index", "flat", "--attend", "topk:30"}));
  EXPECT_EQ(out["options"]["steps"], 4);  // of the command line, as --warmup
  EXPECT_EQ(out["options"]["warmup"], 2);
  EXPECT_EQ(out["options"]["audit_steps"], 2);
  std::vector<std::string> ways, series;
  for (const json& r : out["results"]) {
    ways.push_back(r["index"].get<std::string>() + " " + r["attend"].get<std::string>() + " " +
                   r["tail"].get<std::string>());
    series.push_back(r["series"]);
    EXPECT_GT(r["layer_us"]["p50"], 0);
  }
  EXPECT_EQ(ways, (std::vector<std::string>{
                      "codes topk:16 codes", "ivf:C=32,probe=2 topk:20 none",
                      "ivf:C=32,probe=2 topk:20 second", "ivf:C=32,probe=4 topk:20 none",
                      "ivf:C=32,probe=4 topk:20 second", "flat topk:30 none"}));
  EXPECT_EQ(series[4], "ivf:C=32,probe=2|4");

  const auto refused = [&](const std::string& rest, const std::string& why) {
    write(rest);
    expect_failure(run_keyhole(with(synthetic({"--runs", path}))), 2, why);
  };
  refused(R"("runs": [{"rival": "lsh"}]})", "rivals are compare's");
  refused(R"("goals": ["error=0.1"], "runs": [{"index": "flat"}]})", "no advice");
  refused(R"("options": {"queries": 3}, "runs": [{"index": "flat"}]})",
          "there is no \"queries\"; allowed: k, sink");
  refused(R"("runs": [{"index": "flat"}, {"index": "flat"}]})", "given twice");
  refused(R"("runs": [{"index": "saap"}]})", "trained");
}

TEST(BenchStep, AuditsAgreeWithExactAttention) {
  // Keys enough for all of them: then nothing is missing, and errors are those of rounding.
  const json all = bench(synthetic({"--index", "flat", "--attend", "topk:4096"}))["results"][0];
  EXPECT_EQ(all["audit"]["audits"],
            (4 + 2) * 2 * 4);  // steps, warm-up's included, x layers x query heads
  EXPECT_LT(all["audit"]["error"]["max"], 2e-3);
  EXPECT_DOUBLE_EQ(all["audit"]["recall"], 1);
  EXPECT_GT(all["audit"]["mass"]["mean"], 0.999);
  const json few = bench(synthetic({"--index", "flat", "--attend", "topk:4"}))["results"][0];
  EXPECT_GT(few["audit"]["error"]["median"], 1e-3);
  EXPECT_LT(few["audit"]["mass"]["mean"], 0.999);
  EXPECT_EQ(bench(synthetic({"--index", "flat", "--audit-steps", "0"}))["results"][0]["audit"],
            nullptr);
}

TEST(BenchStep, TheSeedMakesTheData) {
  const auto audit = [](const std::string& seed, const std::string& turn) {
    json figures = bench(synthetic({"--index", "flat", "--attend", "topk:8", "--seed", seed,
                                    "--turn", turn}))["results"][0]["audit"];
    figures.erase("seconds");
    figures.erase("waits");
    return figures;
  };
  EXPECT_EQ(audit("3", "permute"), audit("3", "permute"));
  EXPECT_NE(audit("3", "permute"), audit("4", "permute"));
  // Turning changes no score: what a search finds is worth the same.
  const json permuted = audit("3", "permute");
  const json rotated = audit("3", "rotate");
  EXPECT_NEAR(permuted["mass"]["mean"].get<double>(), rotated["mass"]["mean"].get<double>(), 1e-3);
}

TEST(BenchStep, SharesPartitionsAmongBudgets) {
  const json results =
      bench(synthetic({"--index", "flat", "--attend", "topk:16", "--attend", "none", "--tail",
                       "second", "--min-keys", "64,256"}))["results"];
  ASSERT_EQ(results.size(), 4U);
  EXPECT_EQ(results[2]["name"], "flat none tail=second min=64");
  EXPECT_EQ(results[3]["min_keys"], 256);
  EXPECT_GT(results[3]["statistics"]["keys_attended"], results[2]["statistics"]["keys_attended"]);
  EXPECT_GT(results[3]["audit"]["mass"]["mean"], results[2]["audit"]["mass"]["mean"]);
  EXPECT_GT(results[0]["tail_build_s"], 0);
}

TEST(BenchStep, TakesHeadsOfATraceAndExtendsIt) {
  const TemporaryFolder folder;
  std::mt19937 random(5);
  SyntheticShape shape;
  shape.dim = 64;
  make_synthetic_trace(shape, random).write(folder / "t.safetensors");
  const std::string trace = folder / "t.safetensors";
  const std::vector<std::string> args = {"--trace",    trace, "--index",  "flat",
                                         "--head-dim", "64",  "--attend", "topk:4096"};
  auto shorter = args;
  shorter.insert(shorter.end(), {"--context", "512"});
  const json inside = bench(shorter);
  EXPECT_EQ(inside["options"]["copied_tokens"], 0);
  EXPECT_EQ(inside["options"]["data_heads"], 4);
  EXPECT_LT(inside["results"][0]["audit"]["error"]["max"], 2e-3);
  auto longer = args;
  longer.insert(longer.end(), {"--context", "2k"});
  EXPECT_EQ(bench(longer)["options"]["copied_tokens"], 2048 - (600 - 2 * 9));
}

TEST(BenchStep, TimesStepsBesideBusyThreads) {
  const auto run = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--index", "flat", "--compare", "full", "--attend", "topk:8"});
    return bench(synthetic(std::move(more)));
  };
  const json busy = run({"--busy", "2"});
  EXPECT_EQ(busy["options"]["busy"], 2);
  for (const json& r : busy["results"]) {
    // Steps of a small model may be over before a busy thread has its turn.
    ASSERT_TRUE(r["busy_bytes_per_second"].is_number());
    EXPECT_GE(r["busy_bytes_per_second"], 0);
    EXPECT_GT(r["layer_us"]["p50"], 0);
  }
  const json idle = run({});
  EXPECT_EQ(idle["options"]["busy"], 0);
  EXPECT_EQ(idle["results"][0]["busy_bytes_per_second"], nullptr);
  // What else runs changes times, not answers.
  EXPECT_EQ(busy["results"][0]["audit"]["error"], idle["results"][0]["audit"]["error"]);
  const Outcome outcome = run_keyhole(with(synthetic({"--index", "flat", "--busy", "1"})));
  EXPECT_NE(outcome.out.find("2 threads beside 1 busy"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("busy threads copied "), std::string::npos) << outcome.out;
}

TEST(BenchStep, PrintsATable) {
  const Outcome outcome = run_keyhole(with(synthetic({"--index", "flat"})));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("tokens/s"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("index and budget"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("prefill: "), std::string::npos) << outcome.out;
}

TEST(BenchStep, ShortageIsToldAndTheRestGoesOn) {
  const json flat = bench(synthetic({"--index", "flat"}))["results"][0];
  const uint64_t enough = flat["statistics"]["host_bytes"].get<uint64_t>() + (200U << 10U);
  const TemporaryFolder folder;
  const std::string file = folder / "out.json";
  const Outcome outcome =
      run_keyhole(with(synthetic({"--index", "hnsw:M=32", "--index", "flat", "--host-cap",
                                  std::to_string(enough), "--json", file})));
  expect_failure(outcome, 1, "1 of 2 could not be measured");
  EXPECT_NE(outcome.err.find("host_memory_limit"), std::string::npos) << outcome.err;
  const json results = json::parse(read_file(file))["results"];
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0]["layer_us"], nullptr);
  EXPECT_NE(results[0]["note"].get<std::string>().find("host_memory_limit"), std::string::npos);
  EXPECT_GT(results[1]["layer_us"]["p50"], 0);
}

class BenchStepOnCuda : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(BenchStepOnCuda, WritesWhatExactAttentionWould) {
  std::vector<std::string> args =
      with(synthetic({"--index", "flat", "--attend", "topk:4096", "--attend", "topk:4", "--compare",
                      "full,pcie,resident,q4_0", "--json", "-"}),
           "cuda");
  args.insert(args.end(), GetParam().begin(), GetParam().end());
  const Outcome outcome = run_keyhole(args);
  if (outcome.exit_code == 1 && outcome.err.find("is not available") != std::string::npos) {
    GTEST_SKIP() << outcome.err;
  }
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json out = json::parse(outcome.out);
  const json& results = out["results"];
  ASSERT_EQ(results.size(), 6U);
  EXPECT_LT(results[0]["written_error"]["p99"], 2e-3);
  EXPECT_NEAR(results[1]["written_error"]["p50"].get<double>(),
              results[1]["audit"]["error"]["median"].get<double>(), 0.03);
  for (const json& r : results) {
    EXPECT_GT(r["layer_us"]["p50"], 0);
    EXPECT_GT(r["token_us"]["p50"], r["layer_us"]["p50"]);
    if (r["floor"]) {  // 18 bytes for 32 numbers; 2 KV heads of 64 of 2048 tokens
      const double bandwidth = out["floors"]["copy_bytes_per_second"];
      EXPECT_NEAR(r["layer_us"]["p50"].get<double>(),
                  1e6 * (2 * 2048 * 2 * 64 / 32 * 18) / bandwidth, 1e-6);
    }
    if (r["name"] == "K and V over PCIe" || r["floor"]) continue;
    EXPECT_EQ(r["statistics"]["stream_steps"], 4 * 2);
    EXPECT_GE(r["token_us"]["p99"], r["token_on_device_us"]["p50"]);
  }
  EXPECT_GT(out["floors"]["host_copy_bytes_per_second"], 1e8);
}

TEST(BenchStep, SaysTheFloorOfCodesOnADevice) {
  const Outcome outcome = run_keyhole(
      with(synthetic({"--index", "codes:k=4,v=4", "--index", "flat", "--json", "-"}), "cuda"));
  if (outcome.exit_code == 1 && outcome.err.find("is not available") != std::string::npos) {
    GTEST_SKIP() << outcome.err;
  }
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json out = json::parse(outcome.out), codes = out["results"][0];
  const double bandwidth = out["floors"]["copy_bytes_per_second"];
  // At least 4 bits of each number of 2 KV heads of 64 of the offloaded tokens, at most those of a byte.
  const double bytes = codes["codes_floor_us"].get<double>() * 1e-6 * bandwidth;
  EXPECT_GT(bytes, 1024 * 2 * 2 * 64 / 2);
  EXPECT_LT(bytes, 2304 * 2 * 2 * 64);
  EXPECT_GT(codes["share_of_codes_floor"], 0);
  EXPECT_TRUE(out["results"][1]["codes_floor_us"].is_null());
}

INSTANTIATE_TEST_SUITE_P(Ways, BenchStepOnCuda,
                         testing::Values(std::vector<std::string>{},
                                         std::vector<std::string>{"--weights"},
                                         std::vector<std::string>{"--graph"},
                                         std::vector<std::string>{"--graph", "--weights"}));

void expect_refused(const std::vector<std::string>& args, const std::string& text) {
  const Outcome outcome = run_keyhole(with(args));
  expect_failure(outcome, 2, text);
  EXPECT_EQ(outcome.out, "");
}

TEST(BenchStep, RefusesWhatCannotBe) {
  expect_refused({"--index", "flat"}, "give --trace FILE or --synthetic");
  expect_refused({"--index", "flat", "--synthetic", "--trace", "t"}, "give --trace FILE or");
  expect_refused(synthetic({"--index", "nonsense"}), "nonsense");
  expect_refused(synthetic({"--index", "flat", "--index", "flat"}), "given twice");
  expect_refused(synthetic({"--index", "ivf:rope=undo"}), "RoPE");
  expect_refused(synthetic({"--index", "saap"}), "trained");
  expect_failure(run_keyhole({"bench-step", "--synthetic", "--index", "flat", "--q-heads", "4",
                              "--kv-heads", "3"}),
                 2, "--kv-heads 3");
  expect_refused({"--synthetic", "--index", "flat", "--context", "80"}, "--context 80");
  expect_refused(synthetic({"--index", "flat", "--tail", "some"}), "--tail some");
  expect_refused(synthetic({"--index", "flat", "--tail", "mean:8", "--tail", "second:16"}),
                 "one size for all");
  expect_refused(synthetic({"--index", "flat", "--compare", "nothing"}), "nothing");
  expect_refused(synthetic({"--index", "flat", "--busy", "many"}), "--busy");
  expect_refused(synthetic({"--index", "flat", "--device-cap", "much"}), "much");
  expect_refused(synthetic({"--index", "flat", "--svg", "-"}), "--svg needs a file");
  expect_refused(synthetic({"--index", "flat", "--svg", "s.svg", "--audit-steps", "0"}),
                 "--audit-steps 0");
}

/// Results would name what was not done.
TEST(BenchStep, RefusesWhatIsOfADeviceOnTheHost) {
  const std::vector<std::vector<std::string>> of_device = {
      {"--weights"}, {"--graph"}, {"--signal", "wait"}, {"--signal", "launch"}};
  for (const std::vector<std::string>& options : of_device) {
    std::vector<std::string> args = synthetic({"--index", "flat"});
    args.insert(args.end(), options.begin(), options.end());
    expect_refused(args, options[0] + " is of steps on a CUDA stream, and these are the host's");
  }
}

TEST(BenchStep, TakesEveryHeadDimOfTheLibrary) {
  const Outcome outcome =
      run_keyhole({"bench-step",    "--synthetic", "--device",   "host", "--layers",   "1",
                   "--q-heads",     "2",           "--kv-heads", "1",    "--head-dim", "576",
                   "--context",     "1k",          "--steps",    "1",    "--warmup",   "1",
                   "--audit-steps", "1",           "--index",    "flat", "--json",     "-"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(json::parse(outcome.out)["results"].size(), 1U);
}

}  // namespace
}  // namespace keyhole::tools
