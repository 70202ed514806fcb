// keyhole prefill: what patterns of attention save of the time until a prompt's first token, and what they cost in
// exactness.
#include <keyhole/prefill.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "runtime/files/json.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/decoding.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/recording.h"
#include "tools/commands/common/sweep.h"
#include "tools/commands/prefill/report.h"
#include "tools/llama/gpu_sizes.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/progress.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::ordered_json;

struct PrefillOptions {
  RecordOptions prompt;
  std::vector<std::string> patterns;
  uint32_t turn = 0;  ///< tokens of the prompt, the last ones, that are measured; 0: all of it
  bool no_errors = false;
  std::string json, csv;
};

const std::vector<std::string> kDefaultPatterns = {"a-shape", "sampled:from=0"};

/// dense first, each once.
std::vector<std::string> patterns_of(const PrefillOptions& options) {
  std::vector<std::string> out = {"dense"};
  for (const std::string& pattern :
       options.patterns.empty() ? kDefaultPatterns : options.patterns) {
    for (const std::string& spec :
         pattern.starts_with("budgets:") ? std::vector{pattern} : expand_sweep(pattern)) {
      if (std::find(out.begin(), out.end(), spec) == out.end()) out.push_back(spec);
    }
  }
  return out;
}

std::vector<float> run_prompt(Runner& runner, const std::vector<uint32_t>& tokens,
                              const std::string& title, PrefillTimes* times) {
  Progress bar(title);
  return runner.prefill(
      tokens, {},
      [&](double fraction) {
        throw_if_interrupted();
        bar.update(fraction);
      },
      times);
}

size_t best_token(const std::vector<float>& logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

PrefillChoice choice_of(const ModelOptions& model, const std::string& pattern, bool check = false) {
  return {pattern, check, model.chunk, model.products};
}

void set_pattern(Runner& runner, const PrefillChoice& choice) {
  try {
    runner.set_prefill(choice);
  } catch (const LibraryError& e) {
    throw UsageError("--pattern " + choice.pattern + ": " + e.what());
  }
}

std::vector<PrefillMeasurement> measure(Runner& runner, const std::vector<uint32_t>& tokens,
                                        const std::vector<std::string>& patterns, bool errors,
                                        const ModelOptions& model) {
  // Misspelt patterns are reported before minutes of work.
  for (const std::string& pattern : patterns) set_pattern(runner, choice_of(model, pattern));
  std::vector<PrefillMeasurement> all;
  size_t dense_token = 0;
  for (const std::string& pattern : patterns) {
    set_pattern(runner, choice_of(model, pattern));
    PrefillMeasurement& m = all.emplace_back();
    m.pattern = pattern;
    const Clock::time_point start = Clock::now();
    const std::vector<float> logits = run_prompt(runner, tokens, "prompt, " + pattern, &m.stages);
    m.seconds = seconds_since(start);
    m.share = runner.prefill_share();
    const bool is_dense = all.size() == 1;
    if (is_dense) dense_token = best_token(logits);
    m.same_token = best_token(logits) == dense_token;
    if (!errors || is_dense) continue;
    set_pattern(runner, choice_of(model, pattern, true));
    (void)run_prompt(runner, tokens, "errors of " + pattern, nullptr);
    m.errors = runner.prefill_errors();
  }
  return all;
}

/// Measures the last `turn` tokens alone, as a later turn behind all others, which were attended densely.
std::vector<PrefillMeasurement> measure_turn(Runner& runner, const std::vector<uint32_t>& tokens,
                                             const std::vector<std::string>& patterns,
                                             const ModelOptions& model, uint32_t turn,
                                             uint32_t threads) {
  for (const std::string& pattern : patterns) set_pattern(runner, choice_of(model, pattern));
  set_pattern(runner, choice_of(model, "dense"));
  const auto before = static_cast<uint32_t>(tokens.size()) - turn;
  KeyholeCacheOptions options;
  options.max_tokens = static_cast<uint32_t>(tokens.size());
  options.index = "flat";
  options.mode = KEYHOLE_MODE_EXACT;
  options.threads = threads;
  options.device = runner.session_device("auto");
  KeyholeCache cache(runner.model().config, options);
  (void)prefill_prompt(runner, {tokens.begin(), tokens.begin() + before},
                       [&](const LayerChunk& part) { cache.prefill(part); });
  cache.build(nullptr, nullptr);
  std::vector<PrefillMeasurement> all;
  size_t dense_token = 0;
  for (const std::string& pattern : patterns) {
    set_pattern(runner, choice_of(model, pattern));
    KeyholeCache copy = cache.fork();
    std::vector<float> logits;
    const TurnCost cost =
        extend_by_turn(runner, copy, std::span(tokens).subspan(before), before, &logits);
    PrefillMeasurement& m = all.emplace_back();
    m.pattern = pattern;
    m.seconds = cost.seconds;
    m.share = cost.share;
    if (all.size() == 1) dense_token = best_token(logits);
    m.same_token = best_token(logits) == dense_token;
  }
  return all;
}

void prefill(PrefillOptions options) {
  if (options.json == "-" && options.csv == "-") {
    throw UsageError("--json and --csv cannot both go to standard output");
  }
  for (const std::string& path : {options.json, options.csv}) {
    if (!path.empty()) check_writable(path);
  }
  RecordOptions& prompt = options.prompt;
  if (prompt.task.task.empty() && prompt.prompt_file.empty() && prompt.token_file.empty()) {
    prompt.task.task = "kv";
  }
  const std::vector<std::string> patterns = patterns_of(options);
  const LlamaConfig model = load_llama_config(model_folder(prompt.model) / "config.json");
  const std::vector<uint32_t> tokens = prompt_tokens(prompt);
  if (options.turn >= tokens.size()) {
    throw UsageError("--turn is " + std::to_string(options.turn) +
                     "; allowed: fewer than the prompt's " + std::to_string(tokens.size()) +
                     " tokens");
  }
  for (const std::string& pattern : patterns) {
    if (options.turn == 0 || pattern.rfind("codes", 0) != 0) continue;
    throw UsageError("--turn with --pattern " + pattern +
                     ", which needs the codes of an index; allowed: keyhole eval --turn " +
                     std::to_string(options.turn) + " --prefill " + pattern);
  }
  if (options.turn == 0 && tokens.size() <= kFineTokens) {
    throw UsageError("the prompt has " + std::to_string(tokens.size()) +
                     " tokens; patterns are of prompts of more than " +
                     std::to_string(kFineTokens));
  }
  warn_of_context(model, tokens.size());
  Runner runner = make_runner(prompt.model, prompt.threads);
  const std::vector<PrefillMeasurement> all =
      options.turn != 0
          ? measure_turn(runner, tokens, patterns, prompt.model, options.turn, prompt.threads)
          : measure(runner, tokens, patterns, !options.no_errors, prompt.model);
  const Machine machine = describe_machine("");
  if (!options.json.empty()) {
    write_json(options.json, {{"machine", to_text(machine)},
                              {"device", runner.device()},
                              {"model", model_name(prompt.model)},
                              {"tokens", tokens.size()},
                              {"chunk", prompt.model.chunk},
                              {"products", prompt.model.products},
                              {"turn", options.turn},
                              {"load_s", runner.load_seconds()},
                              {"patterns", prefill_json(all)}});
  }
  if (!options.csv.empty()) write_text(options.csv, prefill_csv(all));
  if (options.json == "-" || options.csv == "-") return;
  const Style style = style_of(stdout);
  const std::string errors = prefill_error_table(all, style);
  std::printf("%s, model on %s\nprompt of %s tokens of %s, loaded in %s\n\n%s%s%s",
              to_text(machine).c_str(), runner.device().c_str(),
              format_count(tokens.size()).c_str(), model_name(prompt.model).c_str(),
              format_duration(runner.load_seconds()).c_str(), prefill_table(all, style).c_str(),
              errors.empty() ? "" : "\n", errors.c_str());
}

constexpr const char* kExplanation =
    R"(The prompt runs once densely and once by each pattern; a second run by each finds the errors.
  blocks            of the blocks of 64 tokens that queries see, the share that they attend
  weights .. logits seconds of stages, on a GPU by its clock: weights to fp32 (on the host); norms, q, k, v and RoPE;
                    attention, and choosing what it reads; what follows it; the last token's logits
  first token       seconds until the first token is known, without loading the model
  error             |o - o*| / |o*| by token and query head beside dense attention to the same q, k and v: of the worst
                    layer, and below of each. The last layer attends with the last token alone, on the host densely
  same token        the first token is that of dense attention)";

}  // namespace

void add_prefill(CLI::App& keyhole) {
  auto options = std::make_shared<PrefillOptions>();
  RecordOptions& prompt = options->prompt;
  CLI::App* command = keyhole.add_subcommand(
      "prefill",
      "Time until a prompt's first token and its attention's errors, by pattern of attention");
  add_model_options(*command, prompt.model);
  add_device_option(*command, prompt.model.device);
  add_task_options(*command, prompt.task);
  command->add_option("--prompt", prompt.prompt_file, "Text file to use as the prompt")
      ->type_name("FILE");
  command->add_option("--tokens", prompt.token_file, "File of token ids to use as the prompt")
      ->type_name("FILE");
  add_repeatable(*command, "--pattern", "PATTERN",
                 "What queries attend, beside dense; name=a|b|c sweeps a parameter. One of\n" +
                     std::string(keyhole_prompt_help()),
                 options->patterns, kDefaultPatterns);
  add_chunk_option(*command, prompt.model.chunk);
  add_products_option(*command, prompt.model.products);
  command->add_option("--turn", options->turn,
                      "Measure the prompt's last tokens alone, as a later turn behind all others: "
                      "so many of them, --chunk at once (default: 4096); without errors");
  command->add_flag("--no-errors", options->no_errors, "Measure times alone: half the work");
  command->add_option("--threads", prompt.threads, "Threads of the host; 0: one per core")
      ->capture_default_str();
  command->add_option("--json", options->json, "Write results as JSON (- for standard output)")
      ->type_name("FILE");
  command->add_option("--csv", options->csv, "Write results as CSV (- for standard output)")
      ->type_name("FILE");
  command->footer(
      examples(
          {"keyhole prefill --length 16k --pattern 'sampled:from=0,mass=900|950'",
           "keyhole prefill --prompt book.txt --pattern budgets:patterns.json --json result.json",
           "keyhole prefill --model DIR --device cuda --task kv --length 128k --no-errors",
           "keyhole prefill --length 32k --turn 2048 --pattern sampled:from=0 --pattern "
           "pooled:from=0"}) +
      "\n\n" + kExplanation);
  command->callback([options] { prefill(*options); });
}

}  // namespace keyhole::tools
