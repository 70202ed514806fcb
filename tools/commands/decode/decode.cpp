// keyhole decode: continues a prompt, streams the text, and says how fast it was and where the time went.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "tools/commands/commands.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/decoding.h"
#include "tools/commands/decode/check.h"
#include "tools/llama/blas.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/machine.h"
#include "tools/terminal/table.h"
#include "tools/terminal/units.h"
#include "tools/tokenizer/token_file.h"

namespace keyhole::tools {
namespace {

using Json = nlohmann::ordered_json;

struct DecodeOptions {
  ModelOptions model;
  TaskOptions task;
  CacheFlags cache;
  std::string prompt_file;
  std::string token_file;
  uint32_t generate = 64;
  AttendSpec index{kAutoIndex, ""};
  uint32_t k = 100;
  std::string attend_text = "topk";
  std::string tail_text;
  std::string target_text = "none";
  BudgetChoice budget;
  bool check = false;
  std::string json;
};

struct Prompt {
  std::vector<uint32_t> tokens;
  std::string expected;  ///< the task's answer; empty for other prompts
};

Prompt make_prompt(const DecodeOptions& options, const Tokenizer* tokenizer) {
  const int sources = static_cast<int>(!options.prompt_file.empty()) +
                      static_cast<int>(!options.token_file.empty()) +
                      static_cast<int>(!options.task.task.empty());
  if (sources != 1) throw UsageError("name exactly one of --prompt, --tokens and --task");
  if (!options.token_file.empty()) return {read_token_file(options.token_file), ""};
  if (!options.prompt_file.empty()) {
    return {tokenizer->encode_prompt(read_text_file(options.prompt_file)), ""};
  }
  const size_t question_bytes = max_question_bytes(options.task.task);
  const uint32_t length = length_of(options.task);
  if (length < question_bytes + 300) {
    throw UsageError("--length is " + std::to_string(length) +
                     "; allowed with --task: " + std::to_string(question_bytes + 300) + " or more");
  }
  const Task task = make_task(options.task, length - 1 - question_bytes, 1);
  const Question& question = task.questions.front();
  return {tokenizer->encode_prompt(task.context + question.prompt), question.answer};
}

/// The generated tokens and what they took.
struct Run {
  std::vector<uint32_t> tokens;
  double prefill_seconds = 0.0;
  double build_seconds = 0.0;
  double decode_seconds = 0.0;
  StepTimes times;
  keyhole_statistics statistics{};
  std::optional<keyhole_audit> audit;

  /// Steps, not tokens: the first token comes from the prefill.
  double tokens_per_second() const {
    return decode_seconds > 0.0 ? static_cast<double>(times.steps) / decode_seconds : 0.0;
  }
};

/// The text of `tokens`, which continue a prompt.
std::string text_of(const Tokenizer& tokenizer, const std::vector<uint32_t>& tokens) {
  StreamDecoder decoder(tokenizer, DecodeState::in_text());
  std::string text;
  for (const uint32_t token : tokens) text += decoder.push(token);
  return text + decoder.finish();
}

/// Greedy decoding until `count` tokens or an end token; shows each as it comes, as a number where there is no tokenizer.
void generate(Decoder& decoder, std::vector<float> logits, uint32_t count, const LlamaConfig& model,
              const Tokenizer* tokenizer, bool stream, Run& run) {
  std::optional<StreamDecoder> text;
  if (tokenizer != nullptr) text.emplace(*tokenizer, DecodeState::in_text());
  const auto show = [stream](const std::string& bytes) {
    if (!stream) return;
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
  };
  uint32_t next = greedy(logits);
  while (true) {
    throw_if_interrupted();
    run.tokens.push_back(next);
    show(text ? text->push(next) : std::to_string(next) + ' ');
    const auto& eos = tokenizer != nullptr ? tokenizer->end_tokens() : model.eos_tokens;
    if (run.tokens.size() == count || std::find(eos.begin(), eos.end(), next) != eos.end()) break;
    next = greedy(decoder.step(next));
  }
  if (text) show(text->finish());
}

std::string time_table(const Run& run) {
  Table table({{"where the time went", Table::Align::left}, {"per token"}, {"share"}});
  const double steps = static_cast<double>(std::max<uint64_t>(1, run.times.steps));
  const auto row = [&](const char* name, double seconds) {
    table.add_row({name, format_duration(seconds / steps),
                   format_number(100.0 * seconds / std::max(1e-12, run.times.total())) + " %"});
  };
  row("attention (Keyhole)", run.times.attention);
  row("projections", run.times.projections);
  row("MLP", run.times.mlp);
  row("logits", run.times.logits);
  return table.text(style_of(stdout));
}

std::string worker_line(const keyhole_statistics& s, uint64_t steps) {
  const double n = static_cast<double>(std::max<uint64_t>(1, steps));
  return "workers per token: search " + format_duration(s.search_seconds / n) +
         ", offloaded attention " + format_duration(s.offload_seconds / n) +
         ", resident attention " + format_duration(s.resident_seconds / n) + ", appends " +
         format_duration(s.append_seconds / n) + "\n" +
         (s.append_blocks == 0
              ? ""
              : "appends: " + format_count(s.append_blocks) + " blocks, " +
                    format_duration(s.background_seconds) + " in the background, " +
                    format_count(s.append_waits) + " steps waited " +
                    format_duration(s.append_wait_seconds) + "\n");
}

/// Whether all heads have the budget of the command line.
bool has_budget(const AttendSpec& spec) { return spec.indexed() && spec.budgets.empty(); }

double scan_fraction(const keyhole_statistics& s) {
  return s.keys_offered == 0
             ? std::nan("")
             : static_cast<double>(s.keys_scored) / static_cast<double>(s.keys_offered);
}

bool answers(const Run& run, const Prompt& prompt, const Tokenizer& tokenizer) {
  return text_of(tokenizer, run.tokens).starts_with(prompt.expected);
}

void print_report(const DecodeOptions& options, const Runner& runner, const Run& run,
                  const Prompt& prompt, const Tokenizer* tokenizer, const CheckResult* check) {
  if (!prompt.expected.empty()) {
    std::printf("answer expected: %s; this is %s\n",
                prompt.expected.substr(0, prompt.expected.find('\n')).c_str(),
                answers(run, prompt, *tokenizer) ? "right" : "wrong");
  }
  const size_t prompt_tokens = prompt.tokens.size();
  std::printf("weights loaded in %s\n", format_duration(runner.load_seconds()).c_str());
  std::printf("prompt %s tokens in %s (%s tokens/s) on %s, index build %s\n",
              format_count(prompt_tokens).c_str(), format_duration(run.prefill_seconds).c_str(),
              format_number(static_cast<double>(prompt_tokens) / run.prefill_seconds).c_str(),
              runner.device().c_str(), format_duration(run.build_seconds).c_str());
  std::printf("decoded %zu tokens with %s%s%s, sink and window on %s: %s tokens/s",
              run.tokens.size(), options.index.shown().c_str(),
              has_budget(options.index) ? ", " : "",
              has_budget(options.index) ? options.budget.text().c_str() : "", run.statistics.device,
              format_number(run.tokens_per_second()).c_str());
  if (const double scanned = scan_fraction(run.statistics); !std::isnan(scanned)) {
    std::printf(", scanned %s %% of the indexed keys", format_number(100.0 * scanned).c_str());
  }
  if (options.index.format()) {
    std::printf(
        "\nK and V of all tokens went through %s and back; the times are not those of such a cache",
        options.index.text.c_str());
  }
  std::printf("\n\n%s%s", time_table(run).c_str(),
              worker_line(run.statistics, run.times.steps).c_str());
  if (run.audit) std::printf("\n%s", audit_text(*run.audit).c_str());
  if (check != nullptr) std::printf("\n%s", to_text(*check).c_str());
}

Json to_json(const DecodeOptions& options, const Runner& runner, const Run& run,
             const Prompt& prompt, const Tokenizer* tokenizer, const CheckResult* check) {
  const keyhole_statistics& s = run.statistics;
  Json json = {{"machine", to_json(describe_machine(s.cpu_level))},
               {"model", model_name(options.model)},
               {"device", runner.device()},
               {"session_device", s.device},
               {"index", options.index.text},
               {"k", options.budget.attend.k},
               {"attend", options.budget.attend.text()},
               {"tail", options.budget.tail.text()},
               {"target", options.budget.target.text()},
               {"budgets", options.cache.budgets},
               {"sink", options.cache.sink},
               {"window", options.cache.window},
               {"kv_dtype", options.cache.kv_dtype},
               {"kv_host", options.cache.kv_host},
               {"threads", s.threads},
               {"blas", blas_kernels()},
               {"prompt_tokens", prompt.tokens.size()},
               {"generated_ids", run.tokens},
               {"load_s", runner.load_seconds()},
               {"prefill_s", run.prefill_seconds},
               {"build_s", run.build_seconds},
               {"tokens_per_second", run.tokens_per_second()},
               {"steps", run.times.steps},
               {"seconds",
                {{"attention", run.times.attention},
                 {"projections", run.times.projections},
                 {"mlp", run.times.mlp},
                 {"logits", run.times.logits}}},
               {"worker_seconds",
                {{"search", s.search_seconds},
                 {"offloaded_attention", s.offload_seconds},
                 {"resident_attention", s.resident_seconds},
                 {"append", s.append_seconds},
                 {"append_wait", s.append_wait_seconds},
                 {"background", s.background_seconds}}},
               {"append_blocks", s.append_blocks},
               {"append_waits", s.append_waits},
               {"scan_fraction", scan_fraction(s)},
               {"host_bytes", s.host_bytes},
               {"index_bytes", s.index_bytes},
               {"device_bytes", s.device_bytes}};
  if (tokenizer != nullptr) json["generated"] = printable(text_of(*tokenizer, run.tokens));
  if (!prompt.expected.empty()) {
    json["expected"] = prompt.expected;
    json["correct"] = answers(run, prompt, *tokenizer);
  }
  if (run.audit) json["audit"] = audit_json(*run.audit);
  if (check != nullptr) json["check"] = to_json(*check);
  return json;
}

void decode(DecodeOptions options) {
  options.budget =
      cross_budgets({parse_attend(options.attend_text, options.k)},
                    options.tail_text.empty() ? std::vector<std::string>()
                                              : std::vector<std::string>{options.tail_text},
                    {options.target_text})
          .front();
  options.index.budgets = options.cache.budgets;
  if (has_budget(options.index)) options.budget = for_index(options.budget, options.index.text);
  if (!options.index.budgets.empty() && !options.index.indexed()) {
    throw UsageError(
        "--index " + options.index.text +
        " with --budgets: allowed is an index spec, for heads that the file does not name");
  }
  if (options.check && options.cache.audit.share > 0.0) {
    throw UsageError(
        "--check attends once more in every step, which would be audited as well: "
        "allowed is one of --check and --audit");
  }
  if (options.check && options.index.format()) {
    throw UsageError("--check attends exactly to what the cache holds, which with --index " +
                     options.index.text +
                     " is rounded itself: allowed with index specs, exact and none; keyhole eval "
                     "compares it with exact attention");
  }
  Runner runner = make_runner(options.model, options.cache.threads);
  options.cache.device = runner.session_device(options.cache.cache_device);
  set_kv_dtype(options.cache, runner.model().config);
  const LlamaConfig& model = runner.model().config;
  // Token ids are what a model without a tokenizer can be given.
  const auto tokenizer = options.token_file.empty() ? load_tokenizer(options.model, model)
                                                    : find_tokenizer(options.model, model);
  const Prompt prompt = make_prompt(options, tokenizer.get());
  const auto prompt_tokens = static_cast<uint32_t>(prompt.tokens.size());
  warn_of_context(model, uint64_t{prompt_tokens} + options.generate);
  const uint32_t most_tokens = prompt_tokens + options.generate;
  KeyholeCache cache =
      options.index.format()
          ? make_rounded_cache(model, options.cache, most_tokens, options.index)
          : make_cache(model, options.cache, most_tokens, {options.index}, {options.budget});
  const std::unique_ptr<Decoder> decoder = runner.decoder(cache);

  Run run;
  std::vector<float> logits;
  run.prefill_seconds = prefill_prompt(*decoder, prompt.tokens, &logits);
  run.build_seconds = apply_spec(cache, options.index, options.budget);
  cache.reset_statistics();

  const bool stream = options.json != "-";
  OutputCheck errors(cache, options.index.mode(), model);
  if (options.check) {
    decoder->set_attention_hook(
        [&](uint32_t layer, const float* q, const float* out) { errors.measure(layer, q, out); });
  }
  const Clock::time_point start = Clock::now();
  generate(*decoder, logits, options.generate, model, tokenizer.get(), stream, run);
  run.decode_seconds = seconds_since(start);
  run.times = decoder->times();
  run.statistics = cache.statistics();
  if (cache.audited()) run.audit = cache.audit();
  if (options.check) run.decode_seconds = run.times.total();  // without the time of the check
  if (stream) std::printf("\n\n");

  std::unique_ptr<CheckResult> check;
  if (options.check) {
    decoder->set_attention_hook({});
    check = std::make_unique<CheckResult>(errors.result());
    compare_tokens(*decoder, cache, prompt_tokens, logits, run.tokens, *check);
  }
  if (stream) print_report(options, runner, run, prompt, tokenizer.get(), check.get());
  if (!options.json.empty()) {
    write_json(options.json, to_json(options, runner, run, prompt, tokenizer.get(), check.get()));
  }
}

}  // namespace

void add_decode(CLI::App& keyhole) {
  auto options = std::make_shared<DecodeOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "decode", "Continue a prompt with a model whose KV cache lies behind an index");
  add_model_options(*command, options->model);
  add_device_option(*command, options->model.device);
  command->add_option("--prompt", options->prompt_file, "Text file to continue")->type_name("FILE");
  command
      ->add_option("--tokens", options->token_file,
                   "File of token ids to continue, for models whose vocabulary is not bytes")
      ->type_name("FILE");
  add_task_options(*command, options->task);
  command->add_option("--generate", options->generate, "Tokens to generate (fewer after an EOS)")
      ->check(CLI::Range(1U, 1U << 24))
      ->capture_default_str();
  command
      ->add_option("--index", options->index.text,
                   "Index spec (keyhole compare --help lists the types), or " + ways_help())
      ->type_name("SPEC")
      ->capture_default_str();
  command->add_option("--k", options->k, "Keys that a search is asked for per query head")
      ->check(CLI::Range(1U, 1U << 30))
      ->capture_default_str();
  command->add_option("--attend", options->attend_text, kAttendHelp)
      ->type_name("WAY")
      ->capture_default_str();
  command->add_option("--tail", options->tail_text, kTailHelp)->type_name("TAIL");
  command->add_option("--target", options->target_text, kTargetHelp)
      ->type_name("TARGET")
      ->capture_default_str();
  add_cache_options(*command, options->cache);
  add_audit_options(*command, options->cache.audit);
  command->add_flag("--check", options->check,
                    "Attend exactly as well: token agreement and error of the attention outputs");
  command
      ->add_option("--json", options->json,
                   "Write the results as JSON; - is standard output, in place of the text")
      ->type_name("FILE");
  command->footer(examples(
      {"keyhole decode --task kv --length 32k --generate 16 --index ivf --check",
       "keyhole decode --task kv --length 32k --index ivf:probe=32 --attend scored --check",
       "keyhole decode --task kv --length 32k --index ivf --tail second --target error=0.05 "
       "--check",
       "keyhole decode --task kv --length 32k --budgets budgets.json --check",
       "keyhole decode --prompt book.txt --generate 200 --index hnsw:M=32,ef=128 --audit 0.01",
       "keyhole decode --model DIR --tokens ids.txt --generate 64 --index exact"}));
  command->callback([options] { decode(*options); });
}

}  // namespace keyhole::tools
