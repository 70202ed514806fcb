#include "tools/commands/decode/options.h"

#include <algorithm>

#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/rounded_cache.h"
#include "tools/commands/common/setting_options.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

void add_prompt(CLI::App& command, DecodeOptions& options) {
  command.add_option("--prompt", options.prompt_file, "Text file to continue")->type_name("FILE");
  command
      .add_option("--tokens", options.token_file,
                  "File of token ids to continue, for models without a tokenizer.json")
      ->type_name("FILE");
  command
      .add_option("--turn", options.turn,
                  "Tokens of the prompt, the last ones, that come as a later turn: behind the "
                  "build of the index, --chunk at once (default: 4096), by the pattern of "
                  "--prefill")
      ->type_name("N");
  add_task_options(command, options.task);
  command.get_option("--seed")->description("Seed of the task, and of what is drawn");
  command
      .add_option("--context", options.context,
                  "Tokens that the session can hold, e.g. 32k; default: what the prompt and "
                  "--generate need, with --interactive and --save-session what the model was made "
                  "for")
      ->type_name("TOKENS");
}

void add_generation(CLI::App& command, DecodeOptions& options) {
  command
      .add_option("--generate", options.generate,
                  "Tokens of an answer at most [64; with --interactive 512]")
      ->type_name("N")
      ->check(CLI::Range(1U, 1U << 24));
  SamplingOptions& sampling = options.sampling;
  command
      .add_option("--temperature", sampling.temperature,
                  "0 takes the most likely token; above, tokens are drawn, with 1 as the model has "
                  "learnt them. Filters work in this order: repetition penalty, temperature, "
                  "top-k, top-p, min-p")
      ->type_name("T")
      ->capture_default_str();
  command.add_option("--top-k", sampling.top_k, "Draw from the K most likely tokens; 0: all")
      ->type_name("K")
      ->capture_default_str();
  command
      .add_option("--top-p", sampling.top_p,
                  "Draw from the fewest tokens whose probabilities add up to P")
      ->type_name("P")
      ->capture_default_str();
  command
      .add_option("--min-p", sampling.min_p,
                  "Draw from tokens that are at least P times as likely as the most likely one")
      ->type_name("P")
      ->capture_default_str();
  command
      .add_option("--repetition-penalty", sampling.repetition_penalty,
                  "Divides positive logits of tokens that the context holds, and multiplies "
                  "negative ones; 1: none")
      ->type_name("X")
      ->capture_default_str();
  command
      .add_option("--stop", options.stops,
                  "A text that ends the answer, and is not shown; may be repeated")
      ->allow_extra_args(false)
      ->type_name("TEXT");
  command.add_flag("--ignore-eos", options.ignore_end,
                   "Go on where the model says that its answer has ended");
}

void add_sessions(CLI::App& command, DecodeOptions& options) {
  command.add_flag("--interactive", options.interactive,
                   "Answer line after line of standard input; /help tells more. Ctrl-C ends an "
                   "answer, Ctrl-D the program");
  CLI::Option* chat =
      command.add_flag("--chat", options.chat,
                       "What is said are messages in the form of the model's chat template "
                       "(tokenizer_config.json): a "
                       "prompt is one, and behind a session that is loaded the next one");
  command.add_option("--system", options.system, "The system's message of a --chat")
      ->type_name("TEXT")
      ->needs(chat);
  command
      .add_option("--save-session", options.save_session,
                  "Write the session and its tokens here in the end, for --load-session")
      ->type_name("FILE");
  command
      .add_option(
          "--load-session", options.load_session,
          "Go on from a session that was saved: without a prompt with what comes next, with "
          "one with as much of the session as it begins with")
      ->type_name("FILE");
}

void add_attention(CLI::App& command, DecodeOptions& options) {
  command
      .add_option(
          "--index", options.index.text,
          "Index spec (keyhole compare --help lists the types), auto (codes of all tokens: "
          "on a GPU of 4 or 2 bits, as there is room, in no lists; on the host of 4 bits in "
          "lists, and exactly up to 8192 offloaded tokens), or " +
              ways_help())
      ->type_name("SPEC")
      ->capture_default_str();
  command
      .add_option("--k", options.k,
                  "Keys that one search finds: of each query head, with codes of the KV head")
      ->check(CLI::Range(1U, 1U << 30))
      ->capture_default_str();
  command.add_option("--attend", options.attend_text, kAttendHelp)
      ->type_name("WAY")
      ->capture_default_str();
  command.add_option("--tail", options.tail_text, kTailHelp)->type_name("TAIL");
  command.add_option("--target", options.target_text, kTargetHelp)
      ->type_name("TARGET")
      ->capture_default_str();
  add_budget_numbers(command, options.numbers);
  add_cache_options(command, options.cache);
  add_parallel_options(command, options.cache.parallel);
  add_audit_options(command, options.cache.audit);
}

/// Excludes options that a saved session decides: its K and V lie in it as they were saved.
void exclude_what_sessions_keep(CLI::App& command) {
  CLI::Option* load = command.get_option("--load-session");
  for (const char* kept : {"--context", "--sink", "--window", "--kv-dtype", "--kv-host",
                           "--dense-layers", "--budgets", "--audit", "--gpu-memory"}) {
    load->excludes(command.get_option(kept));
  }
  for (const Setting& row : kSessionSettings) {
    if (!has_own_option(row)) load->excludes(command.get_option(option_name(row)));
  }
}

}  // namespace

void add_decode_options(CLI::App& command, DecodeOptions& options) {
  add_model_options(command, options.model);
  add_device_option(command, options.model.device);
  add_gpu_memory_option(command, options.model.gpu_memory);
  options.model.prefill = kAutoPrefill;
  add_prefill_option(command, options.model.prefill);
  add_chunk_option(command, options.model.chunk);
  add_products_option(command, options.model.products);
  add_prompt(command, options);
  add_generation(command, options);
  add_sessions(command, options);
  add_attention(command, options);
  exclude_what_sessions_keep(command);
  command.add_flag("--check", options.check,
                   "Attend exactly as well: token agreement and error of the attention outputs");
  command
      .add_option("--json", options.json,
                  "Write the results as JSON; - is standard output, in place of the text")
      ->type_name("FILE");
  command.parse_complete_callback([&command, &options] {
    for (const char* name : {"--index", "--k", "--attend", "--tail", "--target", "--min-keys",
                             "--max-keys", "--exact-rows"}) {
      options.attends_anew |= command.get_option(name)->count() > 0;
    }
  });
}

bool has_budget(const AttendSpec& spec) { return spec.indexed() && spec.budgets.empty(); }

void understand(DecodeOptions& options) {
  options.sampling.seed = options.task.seed;
  if (const std::string text = refusal(options.sampling); !text.empty()) throw UsageError(text);
  const std::vector<BudgetChoice> budgets = with_numbers(
      cross_budgets({parse_attend(options.attend_text, options.k)},
                    options.tail_text.empty() ? std::vector<std::string>()
                                              : std::vector<std::string>{options.tail_text},
                    {options.target_text}),
      options.numbers);
  if (budgets.size() != 1) {
    throw UsageError("--min-keys and --max-keys: allowed is one number of each");
  }
  options.budget = budgets.front();
  options.index.budgets = options.cache.budgets;
  if (has_budget(options.index)) options.budget = for_index(options.budget, options.index.text);
  if (!options.index.budgets.empty() && !options.index.indexed()) {
    throw UsageError(
        "--index " + options.index.text +
        " with --budgets: allowed is an index spec, for heads that the file does not name");
  }
  check_calibration_has_use(options.cache, {&options.index, 1});
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
  if (options.check && (!options.sampling.greedy() || options.interactive)) {
    throw UsageError(
        "--check compares the answer with the most likely tokens of exact attention: allowed "
        "without --temperature and --interactive");
  }
  if (options.chat && !options.token_file.empty()) {
    throw UsageError(
        "--tokens with --chat: allowed are --prompt and --task, whose text is a message");
  }
  if (options.turn != 0 && !options.load_session.empty()) {
    throw UsageError(
        "--turn with --load-session: allowed is one of them, what a prompt has beyond the session "
        "comes behind it in any case");
  }
  check_turn(options.turn, options.cache.parallel);
  if (options.interactive && !options.cache.parallel.kind.empty()) {
    throw UsageError("--interactive with --parallel: allowed is one of them");
  }
  if (options.cache.parallel.kind == "tensor" &&
      !(options.load_session.empty() && options.save_session.empty())) {
    throw UsageError(
        "--parallel tensor with --load-session or --save-session; allowed with these: --parallel "
        "context, or none");
  }
  if (options.interactive && !options.json.empty()) {
    throw UsageError("--json with --interactive: allowed is one of them");
  }
  if (options.index.format() && !(options.load_session + options.save_session).empty()) {
    throw UsageError("--index " + options.index.text +
                     ": a session holds K and V as they are; allowed with --save-session and "
                     "--load-session: index specs, exact and none");
  }
}

uint32_t capacity_of(const DecodeOptions& options, const LlamaConfig& model, size_t prompt_tokens) {
  constexpr uint64_t kMostTokens = uint64_t{1} << 31U;
  const uint64_t needed = prompt_tokens + options.most_tokens();
  const bool grows = options.interactive || !options.save_session.empty();
  const uint64_t chosen = options.context.empty()
                              ? (grows ? std::max(needed, model.longest_context()) : needed)
                              : parse_tokens(options.context);
  if (chosen < needed || chosen > kMostTokens) {
    throw UsageError("--context is " + std::to_string(chosen) + ", allowed: from " +
                     std::to_string(needed) + ", what the prompt and --generate need, to 2^31");
  }
  return static_cast<uint32_t>(chosen);
}

}  // namespace keyhole::tools
