#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

const std::vector<std::string> kShape = {"plan",       "--layers", "32",         "--heads", "32",
                                         "--kv-heads", "8",        "--head-dim", "128"};

Outcome plan(std::vector<std::string> args, const std::vector<std::string>& shape = kShape) {
  args.insert(args.begin(), shape.begin(), shape.end());
  return run_keyhole(args);
}

json plan_json(std::vector<std::string> args, const std::vector<std::string>& shape = kShape) {
  args.insert(args.end(), {"--json", "-"});
  const Outcome outcome = plan(args, shape);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return json::parse(outcome.out);
}

constexpr uint64_t kGib = uint64_t{1} << 30U;
constexpr uint64_t kTokenBytes = 2 * 32 * 8 * 128 * 2;  // K and V, layers, heads, components, fp16

TEST(Plan, AddsUpKeysAndValues) {
  const json result = plan_json({"--context", "128k", "--index", "flat"});
  EXPECT_EQ(result["context"], 131072);
  ASSERT_EQ(result["plans"].size(), 1U);
  const json& row = result["plans"][0];
  EXPECT_EQ(row["kv_bytes"], 131072 * kTokenBytes);
  // What is offloaded lies in host memory: all but sink and window, at least.
  EXPECT_GE(row["host_bytes"], (131072 - 128 - 512) * kTokenBytes);
  EXPECT_GE(row["device_bytes"], (128 + 512) * kTokenBytes);
  EXPECT_LT(row["device_bytes"], 2 * (128 + 512) * kTokenBytes);
  EXPECT_EQ(row["fits"], true);
}

TEST(Plan, CountsOffloadedTokensInInt8) {
  const std::vector<std::string> args = {"--context", "1M", "--index", "flat"};
  const json wide = plan_json(args);
  EXPECT_EQ(wide["kv_host"], "same");
  std::vector<std::string> with = args;
  with.insert(with.end(), {"--kv-host", "int8"});
  const json narrow = plan_json(with);
  EXPECT_EQ(narrow["kv_host"], "int8");
  // Half of it, and a scale of 2 bytes for every 256 numbers.
  const uint64_t saved = wide["plans"][0]["host_bytes"].get<uint64_t>() -
                         narrow["plans"][0]["host_bytes"].get<uint64_t>();
  const uint64_t numbers = (1048576 - 128 - 512) * kTokenBytes / 2;
  EXPECT_NEAR(static_cast<double>(saved), static_cast<double>(numbers - numbers / 128),
              static_cast<double>(numbers) * 1e-3);
  with.back() = "int4";
  expect_failure(plan(with), 2, "--kv-host");
}

TEST(Plan, TellsWhatFits) {
  const std::vector<std::string> args = {"--context",     "1M",    "--index",      "flat",
                                         "--weights",     "15GiB", "--gpu-memory", "24GiB",
                                         "--host-memory", "64GiB"};
  const json tight = plan_json(args);
  EXPECT_EQ(tight["weights"], 15 * kGib);
  EXPECT_EQ(tight["gpu_memory"], 24 * kGib);
  const json& row = tight["plans"][0];
  EXPECT_EQ(row["fits"], false);  // 128 GiB of K and V in 64
  const uint64_t longest = row["longest_context"];
  EXPECT_GT(longest, 400000U);
  EXPECT_LT(longest, 64 * kGib / kTokenBytes + 1024);
  // The promise holds at its border.
  std::vector<std::string> at_border = args;
  at_border[1] = std::to_string(longest);
  EXPECT_EQ(plan_json(at_border)["plans"][0]["fits"], true);
  at_border[1] = std::to_string(longest + 1);
  EXPECT_EQ(plan_json(at_border)["plans"][0]["fits"], false);
}

/// auto takes codes of 4 bits at 128k, and of 2 where those of 4 would leave layers to the host.
TEST(Plan, ChoosesForEachLengthHowLongAContextMayBe) {
  std::vector<std::string> args = {"--context", "128k",  "--card",        "RTX 4090",
                                   "--weights", "15GiB", "--host-memory", "64GiB"};
  const auto row = [&](uint64_t tokens) {
    args[1] = std::to_string(tokens);
    return plan_json(args)["plans"][0];
  };
  const json usual = row(131072);
  EXPECT_EQ(usual["index"], "auto: codes:k=4,v=4");
  const uint64_t longest = usual["longest_context"];
  const json last = row(longest), next = row(longest + 1);
  EXPECT_EQ(last["index"], "auto: codes:k=2,v=2");
  EXPECT_EQ(last["fits"], true);
  EXPECT_EQ(last["longest_context"], longest);
  EXPECT_EQ(next["fits"], false);
  EXPECT_EQ(next["longest_context"], longest);
}

TEST(Plan, NothingFitsWhereTheWeightsFillTheGpu) {
  const json result = plan_json(
      {"--context", "1k", "--index", "flat", "--weights", "24GiB", "--gpu-memory", "24GiB"});
  EXPECT_EQ(result["plans"][0]["fits"], false);
  EXPECT_EQ(result["plans"][0]["longest_context"], 0);
}

TEST(Plan, ReadsTheShapeFromAModel) {
  const TemporaryFolder folder;
  const auto write_config = [&](const std::string& more) {
    write_file(
        folder / "config.json",
        std::string(R"({"model_type":"llama","hidden_size":4096,"intermediate_size":14336,)"
                    R"("num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,)"
                    R"("vocab_size":128256,"rms_norm_eps":1e-5,"rope_theta":500000.0,)"
                    R"("max_position_embeddings":131072,"hidden_act":"silu")") +
            more + "}");
  };
  write_config("");
  const json from_model =
      plan_json({"--context", "128k", "--index", "flat"}, {"plan", "--model", folder.path()});
  EXPECT_EQ(from_model["dtype"], "f16");
  EXPECT_EQ(from_model, plan_json({"--context", "128k", "--index", "flat"}));
  EXPECT_EQ(from_model["prompt"], nullptr) << "it is computed on the host";
  // 8 heads of 128 components: K and V of four chunks in 16 bits are under way.
  const std::vector<std::string> gpu = {"--context", "128k", "--gpu-memory", "80GiB"};
  const json prompt = plan_json(gpu, {"plan", "--model", folder.path()})["prompt"];
  const uint64_t of_token = 4 * 2 * 1024 * 2;
  EXPECT_EQ(prompt["pinned_bytes"].get<uint64_t>() % (128 * of_token), 0U);
  EXPECT_GE(prompt["pinned_bytes"].get<uint64_t>(), 64U << 20U);
  EXPECT_LE(prompt["pinned_bytes"].get<uint64_t>(), 128U << 20U);
  EXPECT_GT(prompt["device_bytes"].get<uint64_t>(), uint64_t{131072} * 4096 * 4);
  EXPECT_EQ(plan_json(gpu)["prompt"], nullptr) << "of no model that is known";
  write_config(R"(,"torch_dtype":"float32")");
  const json wide =
      plan_json({"--context", "128k", "--index", "flat"}, {"plan", "--model", folder.path()});
  EXPECT_EQ(wide["dtype"], "f32");
  EXPECT_EQ(wide["plans"][0]["kv_bytes"], 2 * from_model["plans"][0]["kv_bytes"].get<uint64_t>());
}

TEST(Plan, TellsWhichLayersTheDeviceAttendsAndWhatAllWouldTake) {
  // Sink, window and staging take some 0.13 GiB, codes of 2 bits 2.2 GiB.
  std::vector<std::string> args = {"--context", "128k", "--gpu-memory", "1536MiB"};
  const json some = plan_json(args);
  ASSERT_EQ(some["plans"].size(), 2U);
  const json& row = some["plans"][0];
  EXPECT_EQ(row["index"], "auto: codes:k=2,v=2");
  const uint32_t layers = row["code_layers"];
  EXPECT_GT(layers, 8U);
  EXPECT_LT(layers, 32U);
  EXPECT_EQ(row["first_code_layer"], 32 - layers);
  EXPECT_EQ(row["pinned_kv_bytes"], (131072 - 640) / 256 * 256 * kTokenBytes / 32 * layers);
  EXPECT_GT(row["index_bytes"], 0U);  // the other layers' codes
  EXPECT_EQ(row["fits"], true);
  EXPECT_EQ(some["plans"][1]["index"], "next better: codes:k=2,v=2");
  EXPECT_EQ(some["plans"][1]["code_layers"], 32);
  EXPECT_EQ(some["plans"][1]["fits"], false);
  const Outcome outcome = plan(args);
  const std::string text = std::to_string(layers) + " of 32, from " + std::to_string(32 - layers);
  EXPECT_NE(outcome.out.find(text), std::string::npos) << outcome.out;

  // 4 GiB may be pinned, a quarter of K and V: fewer bits would not help.
  args = {"--context",       "128k",   "--gpu-memory",    "24GiB",
          "--exact-rows-by", "device", "--pinned-memory", "4GiB"};
  const json pinned = plan_json(args);
  ASSERT_EQ(pinned["plans"].size(), 2U);
  EXPECT_EQ(pinned["pinned_memory"], 4 * kGib);
  EXPECT_EQ(pinned["plans"][0]["index"], "auto: codes:k=4,v=4");
  EXPECT_EQ(pinned["plans"][0]["code_layers"], 8);
  EXPECT_LE(pinned["plans"][0]["pinned_kv_bytes"], 4 * kGib);
  EXPECT_EQ(pinned["plans"][1]["index"], "next better: codes:k=4,v=4");
  EXPECT_EQ(pinned["plans"][1]["pinned_kv_bytes"], (131072 - 640) / 256 * 256 * kTokenBytes);
  args.back() = "0";
  EXPECT_EQ(plan_json(args)["plans"][0]["code_layers"], 0);
}

TEST(Plan, TellsWhoReadsTheRowsThatTheDeviceAttendsExactly) {
  std::vector<std::string> args = {"--context", "128k", "--gpu-memory", "24GiB"};
  const json plain = plan_json(args)["plans"][0];
  EXPECT_EQ(plain["rows_by_host"], false);
  EXPECT_EQ(plain["code_layers"], 32);
  // A quarter of K and V may be pinned.
  args.insert(args.end(), {"--pinned-memory", "4GiB"});
  const json some = plan_json(args)["plans"][0];
  EXPECT_EQ(some["rows_by_host"], true);
  EXPECT_EQ(some["code_layers"], 32);
  EXPECT_EQ(some["pinned_kv_bytes"], 0);
  EXPECT_LT(some["pinned_bytes"], plain["pinned_bytes"].get<uint64_t>() + (1U << 20U));
  EXPECT_EQ(some["host_bytes"], plain["host_bytes"]);
  EXPECT_EQ(some["fits"], true);
  const std::string head = plan(args).out;
  EXPECT_NE(head.find("rows read by"), std::string::npos) << head;
  args.insert(args.end(), {"--exact-rows-by", "host"});
  EXPECT_EQ(plan_json(args)["plans"][0], some);
  args.back() = "device";
  EXPECT_EQ(plan_json(args)["plans"][0]["rows_by_host"], false);
  EXPECT_EQ(plan_json(args)["plans"][0]["code_layers"], 8);
}

TEST(Plan, PrintsARowPerIndex) {
  const Outcome outcome =
      plan({"--context", "128k", "--index", "flat", "--index", "ivf:C=1024,probe=32"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* part : {"131,072 tokens hold 16 GiB", "\nflat ", "\nivf:C=1024,probe=32 ",
                           "pinned", "longest context"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(Plan, TellsTheShareOfARankAndWhatItSends) {
  // 8 whole blocks of 4096 tokens over 3 ranks, and 100 tokens of a ninth: 3, 3 and 2, of which the last gets the rest.
  const json result = plan_json({"--context", "32868", "--index", "flat", "--ranks", "3"});
  EXPECT_EQ(result["context"], 32868);
  EXPECT_EQ(result["rank_context"], 3 * 4096);
  EXPECT_EQ(result["plans"][0]["kv_bytes"], 3 * 4096 * kTokenBytes);
  // Of each layer 48 bytes, and 32 heads of 128 components with their sum, in fp32.
  EXPECT_EQ(result["rank_sends_per_token"], 32 * (48 + 32 * 129 * 4));
  // Alone it sends nothing.
  EXPECT_EQ(plan_json({"--context", "8k"})["rank_sends_per_token"], 0);
  const json small = plan_json({"--context", "1k", "--index", "flat", "--host-memory", "2GiB"});
  const json shared =
      plan_json({"--context", "1k", "--index", "flat", "--host-memory", "2GiB", "--ranks", "4"});
  const auto longest = [](const json& j) {
    return j["plans"][0]["longest_context"].get<uint64_t>();
  };
  EXPECT_GT(longest(shared), 3 * longest(small));
  EXPECT_LE(longest(shared), 4 * longest(small));
}

TEST(Plan, RefusesWhatCannotBe) {
  const auto refused = [](const Outcome& outcome, const std::string& part) {
    expect_failure(outcome, 2, part);
  };
  refused(plan({"--index", "flat"}), "--context is required");
  refused(plan({"--contex", "5"}), "--contex");
  refused(plan({"--context", "1k", "--index", "annoy"}), "ivf");
  refused(plan({"--context", "1k", "--index", "flat", "--gpu-memory", "24X"}), "24X");
  refused(plan({"--context", "9000000000000000", "--index", "flat"}), "context");
  // A sequence has 2^31 tokens at most, on all ranks together.
  refused(plan({"--context", "2147483649", "--ranks", "16"}), "2147483648");
  EXPECT_EQ(plan({"--context", "2147483648", "--ranks", "16"}).exit_code, 0);
  refused(plan({"--context", "1k", "--index", "flat"}, {"plan", "--layers", "32"}), "--heads");
  refused(plan({"--context", "1k", "--index", "flat"},
               {"plan", "--layers", "32", "--heads", "32", "--kv-heads", "8", "--head-dim", "100"}),
          "100");
  refused(plan({"--context", "1k", "--index", "flat"},
               {"plan", "--layers", "32", "--heads", "30", "--kv-heads", "8", "--head-dim", "128"}),
          "30");
}

/// The card's memory, less what others take of it, is the limit; estimates stand beside the memory.
TEST(Plan, EstimatesTheSpeedOfACard) {
  const std::vector<std::string> args = {"--context", "128k",     "--weights", "14GiB",
                                         "--card",    "RTX 4090", "--index",   "codes:k=2,v=2"};
  const json result = plan_json(args);
  EXPECT_EQ(result["gpu_memory"], 23 * kGib);
  const json& card = result["card"];
  EXPECT_EQ(card["card"], "RTX 4090");
  EXPECT_EQ(card["weights_read"], 14 * kGib);
  ASSERT_EQ(card["estimates"].size(), 2U);
  const json& codes = card["estimates"][0];
  const json& full = card["estimates"][1];
  // The bytes of the codes and of the weights at the card's own rate are the floor.
  const double floor = (result["plans"][0]["code_bytes"].get<double>() + 14.0 * kGib) / 1008e9;
  EXPECT_GT(codes["token_s"].get<double>(), floor);
  EXPECT_LT(codes["token_s"].get<double>(), 1.6 * floor);
  EXPECT_NEAR(codes["attention_s"].get<double>(), 32 * codes["layer_s"].get<double>(), 1e-9);
  EXPECT_GT(full["attention_s"].get<double>(), 131072 * kTokenBytes / 1008e9);
  EXPECT_GT(full["attention_s"], codes["attention_s"]);

  const Outcome text = plan(args);
  EXPECT_NE(text.out.find("taken for granted"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("full attention (does not fit)"), std::string::npos) << text.out;
  EXPECT_EQ(codes["fits"], true);
  EXPECT_EQ(full["fits"], false);

  // More resident tokens are more to read.
  std::vector<std::string> wide = args;
  wide.insert(wide.end(), {"--window", "16384"});
  EXPECT_GT(plan_json(wide)["card"]["estimates"][0]["layer_s"], codes["layer_s"]);
}

TEST(Plan, EstimatesNothingThatIsNotOnTheCard) {
  const json result = plan_json({"--context", "1M", "--weights", "14GiB", "--card", "RTX 3080",
                                 "--index", "codes:k=4,v=4", "--index", "flat"});
  // Codes of 4 bits, what all of them would take, flat, full attention.
  const json& estimates = result["card"]["estimates"];
  ASSERT_EQ(estimates.size(), 4U);
  EXPECT_EQ(estimates[0].value("why_not", ""), "not all layers' codes are on the card");
  EXPECT_EQ(estimates[2].value("why_not", ""), "no codes, by which the card would attend");
  EXPECT_EQ(estimates[1].value("index", ""), "next better: codes:k=4,v=4");
  EXPECT_GT(estimates[1].value("layer_s", 0.0), 0.0);
  EXPECT_EQ(estimates[1].value("fits", true), false);
  EXPECT_TRUE(plan_json({"--context", "128k"}).value("card", json()).is_null());
}

TEST(Plan, RefusesUnknownCards) {
  expect_failure(plan({"--context", "128k", "--card", "Voodoo"}), 2, "RTX 4090");
  expect_failure(plan({"--context", "128k", "--exact-rows", "64"}), 2, "--card");
  expect_failure(plan({"--context", "128k", "--card", "4090", "--ranks", "2"}), 2, "--ranks");
}

TEST(Plan, RefusesNumbersThatMeanNothing) {
  expect_failure(plan({"--context", "0"}), 2, "--context is 0 tokens, allowed: 1 to");
  const auto with_weights = [](const std::string& active) {
    return plan(
        {"--context", "128k", "--card", "4090", "--weights", "15GiB", "--active-weights", active});
  };
  expect_failure(with_weights("0"), 2, "--active-weights is 0 B");
  expect_failure(with_weights("16GiB"), 2, "--weights, which is 15 GiB");
  EXPECT_EQ(with_weights("15GiB").exit_code, 0);
  expect_failure(plan({"--context", "128k", "--card", "4090", "--active-weights", "1GiB"}), 2,
                 "which is not given");
  const auto with_rows = [](const std::string& rows) {
    return plan({"--context", "128k", "--card", "4090", "--exact-rows", rows});
  };
  expect_failure(with_rows("4000000000"), 2, "--exact-rows");
  expect_failure(with_rows("1025"), 2, "--exact-rows");
  EXPECT_EQ(with_rows("1024").exit_code, 0);
}

/// The memory is what a session takes, so it stays in the plan.
TEST(Plan, WarnsOfAWindowBeyondTheContext) {
  const Outcome wide = plan({"--context", "128k", "--window", "1000000"});
  EXPECT_EQ(wide.exit_code, 0);
  EXPECT_NE(wide.err.find("hold 1,000,128 tokens, and the context is 131,072"), std::string::npos)
      << wide.err;
  EXPECT_EQ(plan({"--context", "128k", "--window", "130944"}).err, "");
  EXPECT_EQ(plan({"--context", "100"}).err, "") << "nobody asked for that window";
}

TEST(Plan, EstimatesCodesInLists) {
  const json card = plan_json({"--context", "256k", "--card", "H100", "--index",
                               "codes:k=4,v=4,lists=64", "--index", "codes:k=4,v=4"})["card"];
  const json& estimates = card["estimates"];
  const double lists = estimates[0].value("layer_s", 0.0), all = estimates[1].value("layer_s", 0.0);
  EXPECT_GT(lists, 0.3 * all);
  EXPECT_LT(lists, 0.8 * all);
  EXPECT_EQ(card["compute_capability"], "9.0");

  // GPUs before compute capability 9.0 choose by a grid of thread blocks: of a card that is not in the table it is not
  // known how many run at once.
  const Outcome before = plan({"--context", "128k", "--card", "24GiB,1008GB,25GB,8.9", "--index",
                               "codes:k=4,v=4,lists=64", "--gpu-memory", "80GiB"});
  EXPECT_NE(before.out.find("8 multiprocessors for each KV head"), std::string::npos) << before.out;
}

/// 8 KV heads want 64 multiprocessors of a card of 8.x; an L4 has 58, an A10 72.
TEST(Plan, CountsNoListsWhereACardHasTooFewMultiprocessors) {
  const std::string all = "codes:k=4,v=4,from=32768",
                    lists = "codes:k=4,v=4,lists=64,from=32768,read=10,miss=50";
  const auto of = [&](const char* card, const char* kv_heads, const char* memory) {
    std::vector<std::string> shape = kShape;
    shape[6] = kv_heads;
    return plan_json({"--context", "128k", "--card", card, "--gpu-memory", memory, "--index", all,
                      "--index", lists},
                     shape);
  };
  const json small = of("L4", "8", "80GiB");
  EXPECT_EQ(small["card"]["multiprocessors"], 58);
  EXPECT_EQ(small["plans"][1]["index"], lists) << "as it was given";
  for (const char* key : {"code_bytes", "device_bytes", "host_bytes", "longest_context"}) {
    EXPECT_EQ(small["plans"][1][key], small["plans"][0][key]) << key;
  }
  const json& times = small["card"]["estimates"];
  EXPECT_NEAR(times[1].value("layer_s", 0.0), times[0].value("layer_s", 1.0), 1e-6);
  for (const json& enough : {of("L4", "4", "80GiB"), of("A10", "8", "80GiB")}) {
    EXPECT_GT(enough["plans"][1]["code_bytes"].get<double>(),
              1.5 * enough["plans"][0]["code_bytes"].get<double>());
    EXPECT_LT(enough["card"]["estimates"][1].value("layer_s", 1.0),
              0.8 * enough["card"]["estimates"][0].value("layer_s", 0.0));
  }
  const Outcome text = plan({"--context", "128k", "--card", "L4", "--index", lists});
  EXPECT_NE(text.out.find("want 64 multiprocessors on this card"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("\n" + lists), std::string::npos) << text.out;
}

/// 23 GiB are too few for lists of 1M tokens of 32 layers: the same memory is read in the same time.
TEST(Plan, EstimatesNoListsThatAreNotPlanned) {
  std::vector<std::string> shape = kShape;
  shape.back() = "80";
  const json result = plan_json({"--context", "1M", "--card", "RTX 3090", "--index",
                                 "codes:k=2,v=2,lists=64", "--index", "codes:k=2,v=2"},
                                shape);
  const json &lists = result["plans"].front(), &all = result["plans"].back();
  EXPECT_EQ(lists["code_bytes"], all["code_bytes"]);
  const json& estimates = result["card"]["estimates"];
  const json& of_all = estimates[result["plans"].size() - 1];
  EXPECT_EQ(estimates[0]["layer_s"], of_all["layer_s"]);
  // A row of codes is 256 + 192 bits, two factors and its part of the block's means: no more than the plan counts.
  const double row = 32 + 24 + 4 + 80.0 / 64;
  EXPECT_GT(all["code_bytes"].get<double>(), 32 * 8 * 1048576 * row);
  EXPECT_LT(all["code_bytes"].get<double>(), 1.02 * 32 * 8 * 1048576 * row);
  EXPECT_GT(of_all["layer_s"].get<double>(), 8 * 1048576 * row / 936e9);
}

json budgets_of(const std::string& heads) {
  const TemporaryFolder folder;
  const std::string path = folder / "budgets.json";
  write_file(path, R"({"keyhole_budgets": 1, "model": {"layers": 32, "q_heads": 32, "kv_heads": 8,)"
                   R"( "head_dim": 128}, "heads": [)" +
                       heads + "]}");
  const auto on = [&](const char* card) {
    json result = plan_json(
        {"--context", "128k", "--card", card, "--gpu-memory", "80GiB", "--budgets", path});
    EXPECT_EQ(result["plans"][0]["index"], path);
    return std::pair(result["plans"][0], result["card"]["estimates"][0]);
  };
  const auto [plan, estimate] = on("H100");
  const auto [small_plan, small_estimate] = on("L4");
  return {{"plan", plan}, {"estimate", estimate}, {"small", small_plan}};
}

/// A file with one index for all heads is planned and estimated as that index.
TEST(Plan, TakesIndexAndRowsOfABudgetsFile) {
  const auto of_index = [&](const char* card, const std::string& index) {
    const json result =
        plan_json({"--context", "128k", "--card", card, "--gpu-memory", "80GiB", "--index", index});
    return std::pair(result["plans"][0], result["card"]["estimates"][0]);
  };
  const std::string lists = "codes:k=4,v=4,lists=64",
                    all = R"({"layer": "all", "kv_head": "all", )";
  const json usual = budgets_of(all + R"("index": ")" + lists + "\"}");
  EXPECT_EQ(usual["plan"]["code_bytes"], of_index("H100", lists).first["code_bytes"]);
  EXPECT_EQ(usual["estimate"]["layer_s"], of_index("H100", lists).second["layer_s"]);
  EXPECT_EQ(usual["small"]["code_bytes"], of_index("L4", lists).first["code_bytes"])
      << "an L4 has no lists";

  const json rows = budgets_of(all + R"("index": "codes:k=4,v=4"}, {"layer": "all", "kv_head": 0,)"
                                     R"( "tail": "codes", "top_k": 80})");
  EXPECT_EQ(rows["estimate"]["exact_rows"], (80 + 7 * 16) / 8);
  const double usual_s = of_index("H100", "codes:k=4,v=4").second["layer_s"];
  EXPECT_NEAR(rows["estimate"]["layer_s"].get<double>() - usual_s, 64 * 512 / 55e9, 1e-9);
  // Where heads differ in their lists the device has none.
  const json mixed =
      budgets_of(all + R"("index": ")" + lists + R"("}, {"layer": 3, "kv_head": 1,)" +
                 R"( "index": "codes:k=4,v=4"})");
  EXPECT_EQ(mixed["estimate"]["layer_s"], usual_s);
}

/// Of 23 GiB weights leave 8: codes of 4 bits take 4.2 of them, in lists 11.
TEST(Plan, SaysThatListsDoNotFit) {
  const std::string lists = "codes:k=4,v=4,lists=64";
  std::vector<std::string> args = {"--context", "128k",  "--card",  "RTX 4090",
                                   "--weights", "15GiB", "--index", lists};
  const json tight = plan_json(args);
  ASSERT_EQ(tight["plans"].size(), 2U);
  const json &row = tight["plans"][0], &next = tight["plans"][1];
  EXPECT_EQ(row["fits"], true);
  EXPECT_EQ(row["lists"], false);
  EXPECT_EQ(row["lists_lack_room"], true);
  EXPECT_EQ(next["index"], "next better: " + lists);
  EXPECT_EQ(next["fits"], false);
  EXPECT_EQ(next["lists"], true);
  EXPECT_GT(next["code_bytes"].get<double>(), 2.0 * row["code_bytes"].get<double>());
  EXPECT_LT(tight["card"]["estimates"][1]["layer_s"], tight["card"]["estimates"][0]["layer_s"]);
  const Outcome text = plan(args);
  EXPECT_NE(text.out.find("Lists of " + lists + " do not fit"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find(lists + " (lists do not fit)"), std::string::npos) << text.out;
  args[5] = "10GiB";
  const json room = plan_json(args);
  ASSERT_EQ(room["plans"].size(), 1U);
  EXPECT_EQ(room["plans"][0]["lists"], true);
  EXPECT_EQ(room["plans"][0]["code_bytes"], next["code_bytes"]);
  // What may be pinned is too little for rows that the device reads, as steps by lists do.
  args.insert(args.end(), {"--pinned-memory", "4GiB"});
  EXPECT_EQ(plan_json(args)["plans"][0]["lists_lack_room"], true);
}

/// Layers for which the card has no room are the host's, which has lists on any card.
TEST(Plan, CountsListsOfTheHostBesideACardWithoutThem) {
  const std::string all = "codes:k=4,v=4", lists = all + ",lists=64";
  const json result = plan_json({"--context", "128k", "--card", "L4", "--gpu-memory", "3GiB",
                                 "--index", all, "--index", lists, "--index", lists + ",read=13"});
  std::vector<json> plans;  // without what all layers would take
  for (const json& row : result["plans"]) {
    if (row["index"].get<std::string>().rfind("next", 0) != 0) plans.push_back(row);
  }
  ASSERT_EQ(plans.size(), 3U);
  const uint32_t layers = plans[0]["code_layers"];
  EXPECT_GT(layers, 8U);
  EXPECT_LT(layers, 24U);
  EXPECT_EQ(plans[1]["code_layers"], layers);
  EXPECT_EQ(plans[1]["device_bytes"], plans[0]["device_bytes"]);
  // Memory of all layers on the host, where no codes are on the card.
  const json host = plan_json({"--context", "128k", "--index", lists})["plans"][0];
  EXPECT_NEAR(plans[1]["index_bytes"].get<double>(),
              host["index_bytes"].get<double>() / 32 * (32 - layers), 32.0);
  EXPECT_EQ(plans[1]["host_bytes"].get<uint64_t>() - plans[0]["host_bytes"].get<uint64_t>(),
            plans[1]["index_bytes"].get<uint64_t>() - plans[0]["index_bytes"].get<uint64_t>());
  EXPECT_EQ(plans[2]["index_bytes"], plans[1]["index_bytes"]);
  // Limits of the host count these lists: at their bytes it fits, one below it does not.
  const uint64_t bytes =
      plans[1]["host_bytes"].get<uint64_t>() + plans[1]["pinned_bytes"].get<uint64_t>();
  for (const uint64_t less : {0, 1}) {
    const json row =
        plan_json({"--context", "128k", "--card", "L4", "--gpu-memory", "3GiB", "--host-memory",
                   std::to_string(bytes - less), "--index", lists})["plans"][0];
    EXPECT_EQ(row["fits"], less == 0);
    EXPECT_EQ(row["longest_context"].get<uint64_t>() >= 131072, less == 0);
  }
}

/// A card without lists of the model's heads takes no memory for them, whatever the spec says.
TEST(Plan, CountsListsWhereACardHasThem) {
  const std::vector<std::string> indexes = {"codes:k=4,v=4", "codes:k=4,v=4,lists=64",
                                            "codes:lists=64,k=4,v=4,miss=0"};
  const auto code_bytes = [&](const std::string& card, const std::vector<std::string>& of,
                              const std::string& heads) {
    std::vector<std::string> args = {"--context", "128k", "--card", card, "--gpu-memory", "80GiB"};
    std::vector<std::string> shape = kShape;
    shape[4] = heads;
    for (const std::string& index : of) args.insert(args.end(), {"--index", index});
    std::vector<uint64_t> bytes;
    const json result = plan_json(args, shape);
    for (const json& row : result["plans"]) bytes.push_back(row["code_bytes"]);
    EXPECT_EQ(bytes.size(), of.size());
    return bytes;
  };
  const std::vector<uint64_t> now = code_bytes("H100", indexes, "32");
  for (const char* card : {"RTX 4090", "RTX 5090", "A100 80GB"}) {
    EXPECT_EQ(code_bytes(card, indexes, "32"), now) << card;
  }
  EXPECT_GT(now[1], now[0] + now[0] / 2);
  EXPECT_GT(now[2], now[0] + now[0] / 2);
  // The first of these has 58 multiprocessors, and 8 KV heads want 64; the other has lists of 16 heads of a KV head,
  // too.
  const std::vector<std::string> early = {"codes:k=4,v=4", "codes:k=4,v=4,lists=64,from=32768"};
  const std::vector<uint64_t> without = code_bytes("L4", early, "32");
  EXPECT_EQ(without[1], without[0]);
  EXPECT_GT(code_bytes("RTX 4090", early, "128")[1], without[0] + without[0] / 2);
  EXPECT_EQ(code_bytes("A100 80GB", {"auto"}, "32")[0], now[0]) << "and auto takes none there";
}

TEST(Plan, SaysWhyAutoTakesNoListsOnAGpu) {
  const auto says = [](const std::vector<std::string>& args) {
    return plan(args).out.find("no lists of codes on a GPU") != std::string::npos;
  };
  EXPECT_TRUE(says({"--context", "128k", "--gpu-memory", "24GiB"}));
  EXPECT_FALSE(says({"--context", "128k"})) << "a host has them";
  EXPECT_TRUE(says({"--context", "128k", "--card", "RTX 4090"}));
  EXPECT_FALSE(says({"--context", "128k", "--card", "L4"})) << "none could be asked for there";
  EXPECT_FALSE(says({"--context", "128k", "--gpu-memory", "24GiB", "--index", "codes:k=4,v=4"}));
}

/// Where no codes fit on a card the host has them, whose lists do not depend on the card.
TEST(Plan, CountsListsOfTheHostBesideAnyCard) {
  for (const char* index : {"auto", "codes:k=4,v=4,lists=64,from=8192"}) {
    const auto of = [&](const char* card) {
      const json row = plan_json({"--context", "128k", "--card", card, "--gpu-memory", "128MiB",
                                  "--index", index})["plans"][0];
      EXPECT_EQ(row["code_layers"], 0) << card;
      return std::pair(row["index"], row["host_bytes"]);
    };
    EXPECT_EQ(of("RTX 4090"), of("H100")) << index;
  }
}

}  // namespace
}  // namespace keyhole::tools
