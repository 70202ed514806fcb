// eval --task text against the reference forward pass; audits of the commands against --check.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <random>

#include "tests/tools/cli/html_data.h"
#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

/// A random model and random token ids, in files.
class RandomText : public ::testing::Test {
 protected:
  void SetUp() override {
    tensors_ = random_weights(small_config(), ElementType::f32, 29);
    write_model(folder_.path(), small_config(), tensors_, ElementType::f32);
    std::mt19937 random(4);
    std::string ids;
    for (int i = 0; i < 150; ++i) {
      tokens_.push_back(std::uniform_int_distribution<uint32_t>(2, 36)(random));
      ids += std::to_string(tokens_.back()) + "\n";
    }
    write_file(folder_ / "ids.txt", ids);
  }

  /// Bits of tokens [begin, end), each by the logits of those before it.
  [[nodiscard]] std::vector<double> reference_bits(size_t begin, size_t end) const {
    const auto logits = reference_logits(small_config(), tensors_, tokens_);
    std::vector<double> bits;
    for (size_t t = begin; t < end; ++t) {
      double sum = 0.0;
      for (const double x : logits[t - 1]) sum += std::exp(x);
      bits.push_back(std::log2(sum) - logits[t - 1][tokens_[t]] / std::log(2.0));
    }
    return bits;
  }

  /// Of eval on the tokens, on the host, with a short sink and window.
  [[nodiscard]] std::vector<std::string> arguments(const std::string& task,
                                                   const std::string& length,
                                                   const std::string& bytes) const {
    return with(eval_of_ids(folder_.path(), folder_ / "ids.txt", task, length), {"--bytes", bytes});
  }

  TemporaryFolder folder_;
  SyntheticTensors tensors_;
  std::vector<uint32_t> tokens_;
};

TEST_F(RandomText, BitsAreThoseOfTheReference) {
  const std::vector<std::string> args = arguments("text", "80", "60");
  const json result = run_json(args, {"--index", "none", "--index", "exact", "--index", "flat",
                                      "--k", "1,1000", "--attend", "topk", "--attend", "scored"});
  EXPECT_EQ(result["task"], "text");
  EXPECT_EQ(result["tokens"], 80);
  EXPECT_EQ(result["decoded"], 60);
  // Token 80 is the first to be decoded, 81 the first to be predicted by a decoding step.
  double mean = 0.0;
  const auto bits = reference_bits(81, 141);
  for (const double b : bits) mean += b / 60.0;
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 6U);  // none, exact, flat with 2 k in 2 ways
  const json& exact = rows[1];
  EXPECT_NEAR(exact["bits_per_token"].get<double>(), mean, 1e-4);
  EXPECT_NEAR(exact["perplexity"].get<double>(), std::exp2(mean), 1e-3);
  EXPECT_FALSE(exact.contains("bits_per_byte"));
  EXPECT_EQ(exact["above_exact"]["bits_per_token"], 0.0);
  for (const json& row : rows) {
    EXPECT_NEAR(row["above_exact"]["bits_per_token"].get<double>(),
                row["bits_per_token"].get<double>() - exact["bits_per_token"].get<double>(), 1e-9);
    EXPECT_GT(row["tokens_per_second"], 0.0);
    EXPECT_FALSE(row.contains("audit"));
    const bool everything = row["attend"] == "scored" || row["k"] == 1000;
    if (everything) {
      EXPECT_NEAR(row["bits_per_token"].get<double>(), mean, 1e-4);
    }
  }
  EXPECT_EQ(rows[0]["bytes_read_per_token"], 0.0);
  EXPECT_GT(exact["bytes_read_per_token"], 0.0);
  EXPECT_GT(std::abs(rows[0]["above_exact"]["bits_per_token"].get<double>()), 1e-3);
  EXPECT_GT(rows[0]["above_exact"]["standard_error"].get<double>(), 1e-4);

  // Without exact there is nothing to compare with; and what came before a row does not matter to it.
  const json again = run_json(args, {"--index", "flat", "--k", "1"});
  ASSERT_EQ(again["results"].size(), 1U);
  EXPECT_FALSE(again["results"][0].contains("above_exact"));
  EXPECT_EQ(again["results"][0]["bits_per_token"], rows[2]["bits_per_token"]);
}

TEST_F(RandomText, DivergenceIsNoneOfAllTokensAndSomeOfAFew) {
  const std::vector<std::string> args = arguments("kld", "80", "60");
  const json result = run_json(args, {"--index", "none", "--index", "flat", "--index", "q8_0",
                                      "--index", "q4_0", "--k", "1000", "--attend", "topk"});
  EXPECT_EQ(result["task"], "kld");
  EXPECT_EQ(result["decoded"], 60);
  const json& rows = result["results"];
  ASSERT_EQ(rows.size(), 5U);  // exact, which nobody asked for, comes first
  EXPECT_EQ(rows[0]["index"], "exact");
  const auto bits = reference_bits(81, 141);
  double mean = 0.0;
  for (const double b : bits) mean += b / 60.0;
  EXPECT_NEAR(rows[0]["bits_per_token"].get<double>(), mean, 1e-4);
  EXPECT_EQ(rows[0]["kld"]["largest"], 0.0);
  EXPECT_EQ(rows[0]["same_best"], 1.0);
  EXPECT_FALSE(rows[0].contains("above_exact"));
  const auto kld = [&](size_t row, const char* what = "mean") {
    return rows[row]["kld"][what].get<double>();
  };
  EXPECT_LT(kld(2, "largest"), 1e-9) << "flat finds all";
  EXPECT_EQ(rows[2]["same_best"], 1.0);
  EXPECT_GT(kld(3), 1e-9) << "q8_0";
  EXPECT_GT(kld(4), 10 * kld(3)) << "q4_0";
  EXPECT_GT(kld(1), kld(4)) << "sink and window alone";
  for (const json& row : rows) {
    const json& k = row["kld"];
    EXPECT_LE(k["p50"], k["p90"]);
    EXPECT_LE(k["p90"], k["p99"]);
    EXPECT_LE(k["p99"], k["p99_9"]);
    EXPECT_LE(k["p99_9"], k["largest"]);
    const auto pieces = row["kld_by_position"].get<std::vector<double>>();
    ASSERT_EQ(pieces.size(), 32U);
    EXPECT_FALSE(row.contains("bins"));
  }
  // By itself, with exact attention beside it; what it says does not depend on the others.
  const json alone = run_json(args, {"--index", "none"});
  ASSERT_EQ(alone["results"].size(), 2U);
  EXPECT_EQ(alone["results"][1]["kld"], rows[1]["kld"]);
}

TEST_F(RandomText, DivergenceByPositionAddsUp) {
  std::vector<std::string> args = arguments("kld", "80", "60");
  args.insert(args.end(), {"--index", "none", "--audit", "1"});
  const TemporaryFolder folder;
  const json result = run_json(args, {"--bins", "4", "--html", folder / "page.html"});
  const json& row = result["results"][1];
  ASSERT_EQ(row["bins"].size(), 4U);
  // Every part is the whole of a shorter text, less the parts before it.
  double nats = 0.0, same = 0.0;
  size_t end = 0;
  for (const json& bin : row["bins"]) {
    EXPECT_EQ(bin["begin"], end);
    end = bin["end"];
    EXPECT_EQ(end % 15, 0U);
    nats += 15 * bin["kld"]["mean"].get<double>();
    same += 15 * bin["same_best"].get<double>();
    EXPECT_GT(bin["output_error"], 0.0);
    const json shorter =
        run_json(arguments("kld", "80", std::to_string(end)), {"--index", "none", "--audit", "1"});
    const json& whole = shorter["results"][1];
    EXPECT_NEAR(whole["kld"]["mean"].get<double>(), nats / static_cast<double>(end), 1e-9);
    EXPECT_NEAR(whole["same_best"].get<double>(), same / static_cast<double>(end), 1e-9);
  }
  EXPECT_EQ(end, 60U);
  double error = 0.0;  // each part has as many audits
  for (const json& bin : row["bins"]) error += bin["output_error"].get<double>() / 4;
  EXPECT_NEAR(row["audit"]["error"]["mean"].get<double>(), error, 1e-6 * error);
  EXPECT_EQ(result_in_page(read_file(folder / "page.html")), result);

  const Outcome text = run_keyhole(with(args, {"--bins", "3"}));
  for (const char* part : {"by position", "0 to 20", "40 to 60", "output error", "p99.9"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
  }
  expect_failure(run_keyhole(with(args, {"--bins", "61"})), 2,
                 "--bins is 61; allowed: at most the 60 tokens of --bytes");
  expect_failure(run_keyhole({"eval", "--task", "text", "--bins", "2"}), 2,
                 "--bins is of --task kld");
}

TEST_F(RandomText, FullHasAllTokensWhereSinkAndWindowLie) {
  const json rows = run_json(arguments("kld", "80", "60"),
                             {"--index", "full", "--index", "exact", "--index", "none"})["results"];
  ASSERT_EQ(rows.size(), 3U);  // full is the exact attention that others are held against
  EXPECT_EQ(rows[0]["bytes_read_per_token"], 0.0);
  EXPECT_GT(rows[1]["bytes_read_per_token"], 0.0);
  EXPECT_LT(rows[1]["kld"]["largest"], 1e-9);
  EXPECT_GT(rows[2]["kld"]["mean"], 1e-6);
}

TEST_F(RandomText, ASignalEndsTheTextBehindAWholePart) {
  constexpr size_t kTokens = 60000, kPart = 100;
  std::vector<uint32_t> tokens;
  while (tokens.size() < kTokens) tokens.insert(tokens.end(), tokens_.begin(), tokens_.end());
  write_file(folder_ / "many.txt", ids_text(tokens));
  const std::string out = folder_ / "cut.json";
  const std::string bytes = std::to_string(kTokens - 200),
                    parts = std::to_string((kTokens - 200) / kPart);
  const auto args = with(eval_of_ids(folder_.path(), folder_ / "many.txt", "kld", "80"),
                         {"--bytes", bytes, "--bins", parts, "--index", "none", "--json", out});
  Command command(args, {}, Command::Output::terminal);
  (void)command.expect("side by side");  // shown when it has taken two seconds
  command.interrupt(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGTERM);
  const json result = json::parse(read_file(out));
  const size_t decoded = result["decoded"];
  EXPECT_EQ(decoded % kPart, 0U);
  EXPECT_LT(decoded, kTokens - 200);
  const json& row = result["results"][1];
  ASSERT_EQ(row["bins"].size(), decoded / kPart);
  EXPECT_EQ(row["bins"].back()["end"], decoded);
  const json first = run_json(eval_of_ids(folder_.path(), folder_ / "many.txt", "kld", "80"),
                              {"--bytes", std::to_string(kPart), "--index", "none"});
  EXPECT_NEAR(row["bins"][0]["kld"]["mean"].get<double>(),
              first["results"][1]["kld"]["mean"].get<double>(), 1e-9);
}

TEST_F(RandomText, PromptsInChunksAndTurnsAreTheReference) {
  const std::vector<std::string> args = with(arguments("text", "140", "8"), {"--index", "exact"});
  double mean = 0.0;
  for (const double b : reference_bits(141, 149)) mean += b / 8.0;
  const auto bits = [](const json& result) {
    return result["results"][0]["bits_per_token"].get<double>();
  };
  using Options = std::vector<std::string>;
  for (const Options& more :
       {Options{"--chunk", "30"}, Options{"--turn", "60"},
        Options{"--turn", "100", "--chunk", "33"},
        Options{"--turn", "60", "--prefill", "sampled:mass=1000,first=999,from=0"}}) {
    const json result = run_json(args, more);
    SCOPED_TRACE(more.back());
    EXPECT_NEAR(bits(result), mean, 1e-4);
    const bool has_turn = more.front() == "--turn";
    EXPECT_EQ(result["turn"]["tokens"], has_turn ? std::stoi(more[1]) : 0);
    EXPECT_EQ(result["turn"]["share"], 1.0);
    EXPECT_EQ(result["turn"]["seconds"] > 0.0, has_turn);
  }
  // Tokens 130 and up see the third block alone.
  const json less =
      run_json(args, {"--turn", "10", "--prefill", "a-shape:first=0,near=0", "--chunk", "10"});
  EXPECT_GT(std::abs(bits(less) - mean), 1e-3);
  EXPECT_NEAR(less["turn"]["share"].get<double>(), 1.0 / 3.0, 1e-9);
  EXPECT_EQ(less["chunk"], 10);
  Options too_long = args;
  too_long.insert(too_long.end(), {"--turn", "140"});
  expect_failure(run_keyhole(too_long), 2,
                 "--turn is 140; allowed: fewer than the prompt's 140 tokens");
}

/// What a turn leaves in the cache shows how it has attended, by what exact attention then predicts beside `full`,
/// whose turn is exact: by one row of each head's index with `--k 1` it is off by 0.0028 bits a byte, by all of its
/// codes of 2 bits by 0.0001 to 0.0003, and exactly by 0.00005 at most.
TEST(EvalText, TurnsAttendTheCodesOfTheLastIndex) {
  constexpr double kExact = 7e-5;
  const auto difference = [](const std::vector<std::string>& more) {
    const json results =
        run_json({"eval",     "--task", "text",   "--length", "1400",     "--bytes", "60",
                  "--device", "host",   "--sink", "16",       "--window", "64",      "--turn",
                  "400",      "--k",    "1",      "--index",  "full",     "--index", "exact"},
                 more)["results"];
    return std::abs(results[1]["bits_per_byte"].get<double>() -
                    results[0]["bits_per_byte"].get<double>());
  };
  const std::vector<std::string> codes = {"--index", "codes:k=2,v=2"};
  EXPECT_LT(difference({"--chunk", "1"}), kExact);
  const double one_by_one = difference(with(codes, {"--chunk", "1"}));
  EXPECT_GT(one_by_one, kExact);
  EXPECT_LT(one_by_one, 1e-3);
  // Several tokens at once attend exactly as a prompt's, or by codes as steps do.
  EXPECT_LT(difference(with(codes, {"--chunk", "8"})), kExact);
  const double as_steps = difference(with(codes, {"--chunk", "8", "--turn-as", "steps"}));
  EXPECT_GT(as_steps, kExact);
  EXPECT_LT(as_steps, 1e-3);
  expect_failure(run_keyhole({"eval", "--task", "text", "--turn-as", "steps"}), 2, "--turn-as");
}

/// Heads keep what a file says of them, whatever index stands beside it.
TEST_F(RandomText, TurnsLeaveTheBudgetsOfAFile) {
  write_file(
      folder_ / "budgets.json",
      R"({"keyhole_budgets": 1, "model": {"layers": 6, "q_heads": 8, "kv_heads": 2, "head_dim": 128},
                 "heads": [{"layer": "all", "kv_head": "all",
                            "index": "flat", "attend": "topk", "top_k": 700, "tail": "none"}]})");
  const auto keys = [&](const std::vector<std::string>& more) {
    const json results =
        run_json({"eval", "--task", "text", "--length", "1400", "--bytes", "20", "--device", "host",
                  "--chunk", "1", "--k", "1", "--index", "full", "--index", "codes:k=2,v=2",
                  "--budgets", folder_ / "budgets.json"},
                 more)["results"];
    for (const json& row : results) {
      if (row["budgets"] != "") return row["keys_attended"].get<double>();
    }
    return 0.0;
  };
  const double without = keys({});
  EXPECT_GT(without, 700.0);
  EXPECT_NEAR(keys({"--turn", "200"}), without, 20.0);  // the window is another's size
}

TEST_F(RandomText, DecodeGoesOnFromATurnAsFromAPrompt) {
  const std::vector<std::string> args = {
      "decode",     "--model", folder_.path(), "--tokens", folder_ / "ids.txt",
      "--generate", "12",      "--ignore-eos", "--window", "16",
      "--sink",     "4",       "--kv-dtype",   "f32",      "--device",
      "host"};
  using Options = std::vector<std::string>;
  // In fp32, from the reference.
  std::vector<uint32_t> all = tokens_, wanted;
  for (int i = 0; i < 12; ++i) {
    const auto logits = reference_logits(small_config(), tensors_, all).back();
    all.push_back(
        static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    wanted.push_back(all.back());
  }
  for (const Options& more :
       {Options{"--turn", "60", "--index", "exact"},
        Options{"--turn", "149", "--index", "flat", "--k", "1000", "--attend", "scored"},
        Options{"--turn", "100", "--index", "exact", "--chunk", "33"},
        Options{"--turn", "60", "--index", "exact", "--prefill",
                "sampled:mass=1000,first=999,from=0", "--check"}}) {
    SCOPED_TRACE(more[1] + " " + more.back());
    const json result = run_json(args, more);
    EXPECT_EQ(result["generated_ids"], json(wanted));
    EXPECT_EQ(result["prompt_tokens"], 150);
    EXPECT_EQ(result["turn"]["tokens"], std::stoi(more[1]));
    EXPECT_EQ(result["turn"]["share"], 1.0);
    EXPECT_GT(result["turn"]["seconds"].get<double>(), 0.0);
    if (result.contains("check")) {
      EXPECT_LT(result["check"]["output_error"]["max"].get<double>(), 1e-4);
    }
  }
  EXPECT_EQ(run_json(args, {"--index", "exact"})["turn"]["tokens"], 0);
  // Tokens 140 and up see the third block alone.
  const json less = run_json(args, {"--turn", "10", "--index", "exact", "--chunk", "10",
                                    "--prefill", "a-shape:first=0,near=0"});
  EXPECT_NEAR(less["turn"]["share"].get<double>(), 1.0 / 3.0, 1e-9);
  const Outcome text = run_keyhole(with(args, {"--turn", "60", "--index", "exact"}));
  EXPECT_NE(text.out.find(", a turn of 60 tokens "), std::string::npos) << text.out;
  const auto refused = [](const Options& some, const char* why) {
    expect_failure(run_keyhole(some), 2, why);
  };
  refused(with(args, {"--turn", "150"}),
          "--turn is 150; allowed: fewer than the prompt's 150 tokens");
  refused({"decode", "--tokens", folder_ / "ids.txt", "--turn", "10", "--load-session", "none"},
          "--turn with --load-session");
}

TEST(EvalText, PredictsTheBundledProse) {
  const std::vector<std::string> args = {
      "eval",    "--task", "text",    "--length",        "1500", "--bytes", "150",
      "--index", "exact",  "--index", "ivf:C=16,probe=4"};
  const json result = run_json(args);
  const double exact = result["results"][0]["bits_per_byte"];
  EXPECT_GT(exact, 0.5);  // English text; a uniform guess takes 8 bits
  EXPECT_LT(exact, 3.0);
  EXPECT_NEAR(result["results"][1]["bits_per_byte"].get<double>(), exact, 0.2);
  const json turn = run_json(args, {"--turn", "700", "--chunk", "300"});
  EXPECT_NEAR(turn["results"][0]["bits_per_byte"].get<double>(), exact, 0.02);
  const Outcome outcome = run_keyhole(args);
  for (const char* part : {"bits/byte", "above exact", "perplexity", "read/token", "+- "}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(AuditOption, FindsWhatTheCheckFinds) {
  const std::vector<std::string> args = {"decode",  "--task",     "kv",  "--length", "1500",
                                         "--index", "flat",       "--k", "3",        "--window",
                                         "64",      "--generate", "24",  "--sink",   "8"};
  const json check = run_json(args, {"--check"})["check"]["output_error"];
  const json result = run_json(args, {"--audit", "1"});
  const json& audit = result["audit"];
  EXPECT_EQ(audit["audits"], result["steps"].get<uint64_t>() * 6 * 8);  // layers, query heads
  for (const char* figure : {"median", "p95", "p99", "max"}) {
    const double truth = check[figure];
    EXPECT_NEAR(audit["error"][figure].get<double>(), truth, 0.04 * truth) << figure;
  }
  EXPECT_EQ(audit["recall"], 1.0);  // a flat index finds the best
  EXPECT_GT(audit["mass"]["mean"], audit["mass"]["p05"]);
  EXPECT_NEAR(audit["missing_mass"]["mean"].get<double>(),
              1.0 - audit["mass"]["mean"].get<double>(), 1e-5);
  EXPECT_EQ(audit["actions"], 0);
}

// On the host: in steps on a stream audits report alone.
TEST(AuditOption, ActsAndReports) {
  const std::vector<std::string> args = {
      "eval",  "--task",   "text", "--length", "1500", "--bytes",       "100", "--index",
      "exact", "--index",  "flat", "--k",      "1",    "--audit",       "0.5", "--audit-bound",
      "0.001", "--device", "host", "--window", "64",   "--audit-action"};
  auto exact = args;
  exact.emplace_back("exact");
  auto report = args;
  report.emplace_back("report");
  const json acted = run_json(exact)["results"];
  const json reported = run_json(report)["results"];
  EXPECT_EQ(acted[0]["audit"]["actions"], 0);
  EXPECT_GT(acted[1]["audit"]["actions"], 6);  // of 12 KV heads
  EXPECT_EQ(reported[1]["audit"]["actions"], 0);
  EXPECT_GT(acted[1]["keys_attended"], reported[1]["keys_attended"]);
  EXPECT_LT(acted[1]["audit"]["error"]["mean"], reported[1]["audit"]["error"]["mean"]);
  const Outcome outcome = run_keyhole(report);
  for (const char* part :
       {"audits: ", "p95", "p99", "mass read", "recall", "estimated", "above the bound"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(EvalText, NamesWhatIsWrong) {
  const TemporaryFolder folder;
  write_file(folder / "short.txt", std::string(500, 'x'));
  const std::string file = folder / "short.txt";
  struct Mistake {
    std::vector<std::string> args;
    int exit_code;
    const char* text;
  };
  const std::vector<Mistake> mistakes = {
      {{"eval", "--task", "text", "--prompt", file, "--length", "400", "--bytes", "101", "--index",
        "exact"},
       2,
       "501 tokens"},
      {{"eval", "--task", "text", "--prompt", file, "--tokens", file, "--index", "exact"},
       2,
       "--prompt and --tokens"},
      {{"eval", "--task", "kv", "--prompt", file, "--index", "exact"}, 2, "--task text"},
      {{"eval", "--task", "text", "--prompt", "/nonexistent", "--index", "exact"},
       1,
       "/nonexistent"},
      {{"eval", "--task", "text", "--bytes", "0", "--index", "exact"}, 2, "--bytes"},
      {{"eval", "--task", "text", "--index", "exact", "--audit", "2"}, 2, "--audit"},
      {{"eval", "--task", "text", "--index", "exact", "--audit-action", "panic"}, 2, "widen"},
      {{"decode", "--task", "text"}, 2, "text"},
      {{"decode", "--task", "kv", "--audit", "0.1", "--check"}, 2, "--check and --audit"},
  };
  for (const Mistake& mistake : mistakes) {
    const Outcome outcome = run_keyhole(mistake.args);
    EXPECT_EQ(outcome.exit_code, mistake.exit_code) << outcome.err;
    EXPECT_NE(outcome.err.find(mistake.text), std::string::npos) << mistake.text << "\n"
                                                                 << outcome.err;
  }
}

}  // namespace
}  // namespace keyhole::tools
