// record, decode and eval from outside: small random models against references, the bundled one on tasks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/tools/llama/run_json.h"
#include "tests/tools/llama/synthetic_model.h"
#include "tools/io/trace.h"
#include "tools/llama/gpu_model.h"
#include "tools/llama/prefill.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;
using namespace testing;

/// A random model with a prompt of token ids, in files.
class SmallModel {
 public:
  explicit SmallModel(size_t prompt_tokens)
      : tensors_(random_weights(small_config(), ElementType::f32, 23)) {
    write_model(folder_.path(), small_config(), tensors_, ElementType::f32);
    std::mt19937 random(3);
    for (size_t i = 0; i < prompt_tokens; ++i) {
      prompt_.push_back(std::uniform_int_distribution<uint32_t>(0, 36)(random));
    }
    write_file(folder_ / "ids.txt", ids_text(prompt_));
  }

  /// On the host, whose rounding the tests' tolerances are of.
  [[nodiscard]] std::vector<std::string> arguments(const std::string& command,
                                                   const std::string& device = "host") const {
    return {command,    "--model", folder_.path(), "--tokens", folder_ / "ids.txt",
            "--device", device};
  }
  [[nodiscard]] std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  [[nodiscard]] const std::vector<uint32_t>& prompt() const { return prompt_; }
  [[nodiscard]] const std::filesystem::path& path() const { return folder_.path(); }

  /// What greedy decoding gives, by the reference forward pass.
  [[nodiscard]] std::vector<uint32_t> continuation(size_t count) const {
    std::vector<uint32_t> tokens = prompt_;
    std::vector<uint32_t> generated;
    while (generated.size() < count && (generated.empty() || generated.back() != 1)) {
      const std::vector<double> logits = reference_logits(small_config(), tensors_, tokens).back();
      generated.push_back(
          static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      tokens.push_back(generated.back());
    }
    return generated;
  }

 private:
  TemporaryFolder folder_;
  SyntheticTensors tensors_;
  std::vector<uint32_t> prompt_;
};

TEST(RecordCommand, WritesWhatThePrefillComputes) {
  const SmallModel model(300);
  const std::filesystem::path out = model.file("trace.safetensors");
  const Outcome outcome =
      run_keyhole(with(model.arguments("record"), {"--out", out, "--layers", "2,0", "--queries",
                                                   "40", "--training", "25", "--dtype", "f32"}));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Trace trace = Trace::open(out);
  EXPECT_EQ(trace.info().layers, (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(trace.info().tokens, 300U);
  EXPECT_EQ(trace.info().q_heads, 6U);
  EXPECT_FLOAT_EQ(trace.info().scale, 0.125F);
  EXPECT_FLOAT_EQ(trace.info().rope.theta, 10000.0F);
  ASSERT_EQ(trace.query_positions().size(), 40U);
  EXPECT_EQ(trace.query_positions().front(), 260U);
  EXPECT_EQ(trace.query_positions().back(), 299U);
  ASSERT_EQ(trace.training_positions().size(), 25U);
  EXPECT_LT(trace.training_positions().back(), 260U);

  std::map<uint32_t, std::vector<float>> q, k, v;  // by layer
  Team team(1);
  (void)prefill(load_llama(model.path()), team, model.prompt(), [&](const LayerChunk& chunk) {
    q[chunk.layer].assign(chunk.q, chunk.q + chunk.tokens * 6 * 64);
    k[chunk.layer].assign(chunk.k, chunk.k + chunk.tokens * 2 * 64);
    v[chunk.layer].assign(chunk.v, chunk.v + chunk.tokens * 2 * 64);
  });
  ASSERT_EQ(trace.heads().size(), 4U);
  for (const TraceHead& head : trace.heads()) {
    const std::vector<float> keys = head.keys.to_f32();
    const std::vector<float> values = head.values->to_f32();
    for (size_t t = 0; t < 300; ++t) {
      for (size_t i = 0; i < 64; ++i) {
        const size_t at = (t * 2 + head.kv_head) * 64 + i;
        // The command may use other BLAS kernels than this process.
        ASSERT_NEAR(keys[t * 64 + i], k[head.layer][at], 1e-4);
        ASSERT_NEAR(values[t * 64 + i], v[head.layer][at], 1e-4);
      }
    }
    const auto expect_queries = [&](const StoredTensor& queries,
                                    std::span<const uint32_t> positions) {
      const std::vector<float> rows = queries.to_f32();
      ASSERT_EQ(rows.size(), positions.size() * 3 * 64);
      for (size_t row = 0; row < positions.size(); ++row) {
        for (size_t i = 0; i < size_t{3} * 64; ++i) {
          const size_t at = (positions[row] * 6 + head.kv_head * 3) * 64 + i;
          ASSERT_NEAR(rows[row * 3 * 64 + i], q[head.layer][at], 1e-4);
        }
      }
    };
    expect_queries(head.queries, trace.query_positions());
    expect_queries(*head.training_queries, trace.training_positions());
  }
}

TEST(RecordCommand, ATaskEndsWithItsQuestionsAndAnswers) {
  const TemporaryFolder folder;
  const std::filesystem::path out = folder / "kv.safetensors";
  const Outcome outcome = run_keyhole({"record", "--task", "kv", "--length", "1000", "--queries",
                                       "200", "--layers", "5", "--out", out});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const Trace trace = Trace::open(out);
  EXPECT_EQ(trace.info().task, "kv");
  EXPECT_LE(trace.info().tokens, 1000U);
  EXPECT_GT(trace.info().tokens, 900U);
  EXPECT_EQ(trace.query_positions().size(), 200U);
}

TEST(DecodeCommand, GeneratesWhatTheReferenceGenerates) {
  const SmallModel model(120);
  const json result = run_json(with(model.arguments("decode"),
                                    {"--generate", "12", "--index", "flat", "--k", "1000", "--sink",
                                     "4", "--window", "16", "--kv-dtype", "f32", "--check"}));
  const std::vector<uint32_t> expected = model.continuation(12);
  EXPECT_EQ(result["generated_ids"].get<std::vector<uint32_t>>(), expected);
  EXPECT_EQ(result["prompt_tokens"], 120);
  EXPECT_EQ(result["steps"], expected.size() - 1);
  EXPECT_EQ(result["check"]["agreeing"], expected.size());
  EXPECT_EQ(result["check"]["first_difference"], expected.size());
  EXPECT_LT(result["check"]["output_error"]["max"].get<double>(), 1e-5);
}

TEST(DecodeCommand, SaysWhereItRuns) {
  const SmallModel model(40);
  const json result = run_json(with(model.arguments("decode"), {"--generate", "2"}));
  EXPECT_EQ(result["device"], "host");
  EXPECT_EQ(result["session_device"], "host");
  const Outcome gpu = run_keyhole(with(model.arguments("decode", "cuda"), {"--generate", "2"}));
  const std::string refusal = gpu_refusal(load_llama(model.path()).config);
  EXPECT_EQ(gpu.exit_code == 0, refusal.empty()) << gpu.err;
  if (!refusal.empty()) {
    EXPECT_NE(gpu.err.find("--device cuda: " + refusal), std::string::npos) << gpu.err;
  }
  EXPECT_NE(run_keyhole(model.arguments("decode", "tpu")).exit_code, 0);
}

TEST(DecodeCommand, StoresKAndVAsTheModelsConfigSays) {
  const SmallModel model(40);
  json config = small_config();
  config["torch_dtype"] = "bfloat16";
  write_file(model.file("config.json"), config.dump());
  EXPECT_EQ(run_json(with(model.arguments("decode"), {"--generate", "1"}))["kv_dtype"], "bf16");
  const std::vector<std::string> f16 = {"--generate", "1", "--kv-dtype", "f16"};
  EXPECT_EQ(run_json(with(model.arguments("decode"), f16))["kv_dtype"], "f16");
}

TEST(DecodeCommand, UsesBlasKernelsThatFitTheCpu) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "a CPU without AVX2";
  const SmallModel model(8);
  const json result = run_json(with(model.arguments("decode"), {"--generate", "1"}));
  // Debian's OpenBLAS takes a CPU that is newer than itself for one of these.
  for (const char* old : {"Prescott", "Nehalem", "Barcelona"}) EXPECT_NE(result["blas"], old);
#endif
}

TEST(DecodeCommand, TheCheckSeesWhatSinkAndWindowLeaveOut) {
  const SmallModel model(120);
  const json result = run_json(
      with(model.arguments("decode"), {"--generate", "12", "--index", "none", "--sink", "4",
                                       "--window", "16", "--kv-dtype", "f32", "--check"}));
  EXPECT_GT(result["check"]["output_error"]["median"].get<double>(), 0.05);
  EXPECT_EQ(result["check"]["layer_mean_output_error"].size(), 3U);
}

TEST(DecodeCommand, AttendingWhatFlatScoredIsExact) {
  const SmallModel model(120);
  const json result =
      run_json(with(model.arguments("decode"),
                    {"--generate", "12", "--index", "flat", "--k", "1", "--attend", "scored",
                     "--sink", "4", "--window", "16", "--kv-dtype", "f32", "--check"}));
  EXPECT_EQ(result["attend"], "scored");
  EXPECT_LT(result["check"]["output_error"]["p95"].get<double>(), 1e-4);
  EXPECT_LT(result["check"]["output_error"]["p99"].get<double>(), 1e-4);
}

TEST(DecodeCommand, StreamsTextAndSaysWhereTheTimeWent) {
  const Outcome outcome = run_keyhole({"decode", "--task", "kv", "--length", "1500", "--seed", "2",
                                       "--generate", "20", "--index", "flat"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* part : {"this is right", "tokens/s", "attention (Keyhole)", "MLP", "search"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(DecodeCommand, ContinuesATextFile) {
  const TemporaryFolder folder;
  write_file(folder / "prompt.txt",
             std::string("The quick brown fox jumps over the lazy dog. In the "
                         "beginning God created the "));
  const json result = run_json({"decode", "--prompt", folder / "prompt.txt", "--generate", "5"});
  EXPECT_EQ(result["generated"], "state");  // as in golden.json
}

/// Runs `args` after the prompt, and expects success with a warning of this many tokens, or of none.
void expect_context_warning(const std::vector<std::string>& args, const std::string& tokens) {
  const Outcome outcome = run_keyhole(args);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  if (tokens.empty()) {
    EXPECT_EQ(outcome.err, "") << args.front();
    return;
  }
  EXPECT_NE(outcome.err.find("warning: the context is " + tokens + " tokens long"),
            std::string::npos)
      << args.front() << ": " << outcome.err;
  EXPECT_NE(outcome.err.find("the model's is 512"), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out.find("warning"), std::string::npos) << outcome.out;
}

// The small model's max_position_embeddings are 512.
TEST(ModelCommands, WarnOfAContextThatTheModelWasNotMadeFor) {
  const SmallModel fits(500);
  const std::vector<std::string> none = {"--index", "none", "--window", "64", "--sink", "8"};
  expect_context_warning(with(with(fits.arguments("decode"), none), {"--generate", "12"}), "");
  expect_context_warning(with(with(fits.arguments("decode"), none), {"--generate", "13"}), "513");
  const std::string trace = fits.file("t.safetensors");
  expect_context_warning(with(fits.arguments("record"), {"--queries", "4", "--out", trace}), "");

  const SmallModel longer(600);
  expect_context_warning(with(longer.arguments("record"), {"--queries", "4", "--out", trace}),
                         "600");
  expect_context_warning(with(with(longer.arguments("eval"), none),
                              {"--task", "text", "--length", "520", "--bytes", "10"}),
                         "530");
  expect_context_warning({"plan", "--model", longer.path(), "--context", "512", "--index", "flat"},
                         "");
  expect_context_warning({"plan", "--model", longer.path(), "--context", "1k", "--index", "flat"},
                         "1,024");
}

TEST(ModelCommands, WarnOfARopeOfWhichNotAllIsRead) {
  const SmallModel model(40);
  json config = json::parse(read_file(model.file("config.json")));
  config["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 4.0}, {"attn_factor", 0.8}, {"attention_factor", 1.0}};
  write_file(model.file("config.json"), config.dump());
  const Outcome outcome = run_keyhole(with(model.arguments("decode"), {"--generate", "2"}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("warning: the rope_scaling"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("attn_factor"), std::string::npos) << outcome.err;
}

TEST(ModelCommands, WarnOfALengthBeyondTheModels) {
  // The bundled model, made for fewer tokens.
  const std::filesystem::path bundled = KEYHOLE_SOURCE_MODEL;
  const TemporaryFolder folder;
  json config = json::parse(read_file(bundled / "config.json"));
  config["max_position_embeddings"] = 512;
  write_file(folder / "config.json", config.dump());
  std::filesystem::create_symlink(bundled / "model.safetensors", folder / "model.safetensors");
  const std::vector<std::string> args = {"eval",        "--task", "kv",      "--length", "600",
                                         "--questions", "1",      "--index", "none"};
  expect_context_warning(args, "");
  const Outcome outcome = run_keyhole(with(args, {"--model", folder.path()}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("but the model's is 512"), std::string::npos) << outcome.err;
}

TEST(EvalCommand, AnswersOnAGpuAsOnTheHost) {
  const SmallModel model(8);
  if (const std::string refusal = gpu_refusal(load_llama(model.path()).config); !refusal.empty()) {
    GTEST_SKIP() << refusal;
  }
  // Of the bundled model, which is trained: what is not ambiguous does not change with rounding.
  const auto run = [](const std::string& device, const std::string& cache) {
    return run_json({"eval", "--task", "kv", "--length", "4000", "--questions", "16", "--index",
                     "exact", "--index", "ivf", "--device", device, "--cache-device", cache});
  };
  const json host = run("host", "host");
  for (const std::string cache : {"host", "cuda"}) {
    const json gpu = run("cuda", cache);
    EXPECT_NE(gpu["device"], "host");
    EXPECT_EQ(gpu["session_device"] == "host", cache == "host");
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(gpu["results"][i]["correct"].get<int>(), host["results"][i]["correct"].get<int>(),
                  1);
      EXPECT_GT(gpu["results"][i]["correct"].get<int>(), 12);
    }
  }
}

TEST(EvalCommand, TellsIndexesFromExactAndNone) {
  const json result = run_json({"eval", "--task", "kv", "--length", "2000", "--questions", "12",
                                "--window", "64", "--sink", "16", "--index", "exact", "--index",
                                "none", "--index", "flat", "--k", "1,2000"});
  ASSERT_EQ(result["results"].size(), 4U);  // exact, none, flat twice
  const json& exact = result["results"][0];
  const json& none = result["results"][1];
  const json& flat = result["results"][3];
  EXPECT_GE(exact["correct"], 11);
  EXPECT_LE(none["correct"], 3);
  EXPECT_EQ(flat["k"], 2000);
  EXPECT_EQ(flat["correct"], exact["correct"]);
  EXPECT_DOUBLE_EQ(flat["scan_fraction"], 1.0);
  EXPECT_DOUBLE_EQ(none["scan_fraction"], 0.0);
  EXPECT_LT(result["results"][2]["keys_attended"], flat["keys_attended"]);
  for (const json& row : result["results"]) {
    EXPECT_EQ(row["questions"], 12);
    EXPECT_EQ(row["wrong"].size(), 12 - row["correct"].get<size_t>());
    EXPECT_GT(row["tokens_per_second"], 0.0);
  }
}

TEST(EvalCommand, AttendsInEveryWay) {
  const json result =
      run_json({"eval",     "--task", "kv",       "--length",   "2000",    "--questions", "12",
                "--window", "64",     "--sink",   "16",         "--index", "exact",       "--index",
                "flat",     "--k",    "1",        "--attend",   "topk",    "--attend",    "topk:20",
                "--attend", "scored", "--attend", "weight:0.01"});
  ASSERT_EQ(result["results"].size(), 5U);
  const json& exact = result["results"][0];
  EXPECT_TRUE(exact["attend"].is_null());
  const char* names[] = {"topk:1", "topk:20", "scored", "weight:0.01"};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(result["results"][1 + i]["attend"], names[i]);
    EXPECT_DOUBLE_EQ(result["results"][1 + i]["scan_fraction"], 1.0);
  }
  // Attending all that a flat index scored is exact attention.
  const json& scored = result["results"][3];
  EXPECT_EQ(scored["correct"], exact["correct"]);
  EXPECT_EQ(scored["keys_attended"], exact["keys_attended"]);
  const json& weight = result["results"][4];
  EXPECT_LT(weight["keys_attended"], scored["keys_attended"]);
  EXPECT_GE(weight["correct"], 11);
}

TEST(EvalCommand, CrossesTailsAndTargets) {
  const json result =
      run_json({"eval",        "--task",   "kv",       "--length", "2000",
                "--questions", "8",        "--window", "64",       "--sink",
                "16",          "--index",  "exact",    "--index",  "ivf:C=32,probe=2",
                "--attend",    "topk:8",   "--tail",   "none",     "--tail",
                "second:8",    "--target", "none",     "--target", "error=0.02"});
  ASSERT_EQ(result["results"].size(), 5U);
  EXPECT_TRUE(result["results"][0]["tail"].is_null());
  // Without a tail, a target reads the partitions that the tails have.
  const char* tails[] = {"none", "none", "second:8", "second:8"};
  const char* targets[] = {"none", "error=0.02", "none", "error=0.02"};
  for (size_t i = 0; i < 4; ++i) {
    const json& row = result["results"][1 + i];
    EXPECT_EQ(row["tail"], tails[i]);
    EXPECT_EQ(row["target"], targets[i]);
  }
  // A target reads what it needs.
  EXPECT_GT(result["results"][2]["keys_attended"], result["results"][1]["keys_attended"]);
}

TEST(CalibrateCommand, ItsFileServesDecodeAndEval) {
  const TemporaryFolder folder;
  const std::string file = folder / "budgets.json";
  const Outcome outcome = run_keyhole({"calibrate",
                                       "--length",
                                       "2000",
                                       "--error",
                                       "0.2",
                                       "--index",
                                       "ivf:C=32,probe=4|16",
                                       "--attend",
                                       "weight:0.001",
                                       "--tail",
                                       "none",
                                       "--tail",
                                       "second",
                                       "--target",
                                       "none",
                                       "--cost",
                                       "bytes",
                                       "--queries",
                                       "16",
                                       "--window",
                                       "64",
                                       "--sink",
                                       "16",
                                       "--out",
                                       file});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json budgets = json::parse(read_file(file));
  EXPECT_EQ(budgets["model"]["layers"], 6);
  EXPECT_EQ(budgets["heads"].size(), 12U);

  const json decoded = run_json({"decode", "--task", "kv", "--length", "2000", "--window", "64",
                                 "--sink", "16", "--generate", "6", "--budgets", file, "--check"});
  EXPECT_EQ(decoded["budgets"], file);
  EXPECT_LT(decoded["check"]["output_error"]["median"].get<double>(), 0.2);
  const json result =
      run_json({"eval", "--task", "kv", "--length", "2000", "--questions", "8", "--window", "64",
                "--sink", "16", "--budgets", file, "--index", "exact"});
  ASSERT_EQ(result["results"].size(), 2U);
  EXPECT_EQ(result["results"][0]["budgets"], file);
  EXPECT_TRUE(result["results"][0]["attend"].is_null());
  EXPECT_EQ(result["results"][1]["index"], "exact");
  EXPECT_LT(result["results"][0]["keys_attended"], result["results"][1]["keys_attended"]);
  EXPECT_GE(result["results"][0]["correct"].get<int>(),
            result["results"][1]["correct"].get<int>() - 2);
}

TEST(EvalCommand, AsksForPassKeysInAnyHaystack) {
  const TemporaryFolder folder;
  std::string prose;
  for (int i = 0; i < 50; ++i)
    prose += "It was a dark and stormy night; the rain fell in torrents. ";
  write_file(folder / "prose.txt", prose);
  const Outcome outcome =
      run_keyhole({"eval", "--task", "passkey", "--length", "2000", "--questions", "4",
                   "--haystack", folder / "prose.txt", "--index", "exact", "--index", "none"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  for (const char* part : {"correct", "exact", "none", "/4"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << outcome.out;
  }
}

struct CommandMistake {
  std::vector<std::string> args;
  int exit_code;
  const char* text;
};

TEST(ModelCommands, NameWhatIsWrong) {
  const SmallModel model(20);
  const std::string folder = model.path();
  const std::vector<CommandMistake> mistakes = {
      {{"decode"}, 2, "--prompt, --tokens and --task"},
      {{"decode", "--task", "kv", "--prompt", "x"}, 2, "exactly one"},
      {{"decode", "--task", "copy"}, 2, "copy"},
      {{"decode", "--task", "kv", "--index", "q4_0", "--check"}, 2, "--check"},
      {{"eval", "--task", "copy", "--length", "1000", "--questions", "4", "--index", "none"},
       2,
       "allowed: 1 to 3"},
      {{"eval", "--task", "copy", "--length", "2M", "--index", "none"}, 2, "the haystack has"},
      {{"decode", "--task", "kv", "--length", "65"}, 2, "--length is 65"},
      {{"decode", "--task", "kv", "--length", "eight"}, 2, "eight"},
      {{"decode", "--task", "kv", "--k", "0"}, 2, "--k"},
      {{"decode", "--task", "kv", "--kv-dtype", "i8"}, 2, "f16"},
      {{"decode", "--task", "kv", "--attend", "heavy"}, 2, "weight:EPS"},
      {{"eval", "--task", "kv", "--index", "flat", "--attend", "weight:2"}, 2, "weight:EPS"},
      {{"decode", "--prompt", "/nonexistent"}, 1, "/nonexistent"},
      {{"decode", "--model", "/nonexistent", "--task", "kv"}, 1, "/nonexistent"},
      {{"decode", "--model", folder, "--task", "kv"}, 1, "37 tokens"},
      {{"decode", "--task", "kv", "--length", "600", "--index", "nonsense"}, 2, "nonsense"},
      {{"decode", "--task", "kv", "--length", "600", "--window", "0"}, 2, "window"},
      {{"decode", "--task", "kv", "--tail", "third"}, 2, "--tail third"},
      {{"decode", "--task", "kv", "--target", "error=2"}, 2, "--target error=2"},
      {{"decode", "--task", "kv", "--length", "600", "--budgets", "/nonexistent"},
       1,
       "/nonexistent"},
      {{"decode", "--task", "kv", "--index", "exact", "--budgets", "x"}, 2, "--index exact"},
      {{"calibrate", "--length", "600"}, 2, "--out"},
      {{"eval", "--index", "flat"}, 2, "--task"},
      {{"eval", "--task", "kv", "--index", "exact", "--index", "ivf:probes=3"}, 2, "probes"},
      {{"eval", "--task", "kv", "--length", "1000", "--questions", "500", "--index", "none"},
       2,
       "questions is 500"},
      {{"eval", "--task", "passkey", "--length", "1k", "--questions", "9", "--index", "none"},
       2,
       "questions is 9"},
      {{"record", "--task", "kv"}, 2, "--out"},
      {{"record", "--task", "kv", "--length", "300", "--out", "/tmp/x"}, 2, "--queries 256"},
      {{"record", "--task", "kv", "--out", "/nonexistent/x"}, 1, "/nonexistent/x"},
      {{"record", "--task", "kv", "--layers", "6", "--out", "/tmp/x"},
       2,
       "layer 6; allowed: 0 to 5"},
  };
  for (const CommandMistake& mistake : mistakes) {
    const Outcome outcome = run_keyhole(mistake.args);
    std::string line;
    for (const std::string& arg : mistake.args) line += arg + " ";
    EXPECT_EQ(outcome.exit_code, mistake.exit_code) << line << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find(mistake.text), std::string::npos) << line << "\n" << outcome.err;
    EXPECT_EQ(outcome.out, "") << line;
  }
}

}  // namespace
}  // namespace keyhole::tools
