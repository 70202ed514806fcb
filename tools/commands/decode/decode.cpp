// keyhole decode: continues a prompt, streams the text, and says how fast it was and where the time went.
#include <cstdio>
#include <memory>
#include <optional>
#include <utility>

#include "runtime/files/json.h"
#include "tools/commands/commands.h"
#include "tools/commands/common/context_warning.h"
#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/decode/conversation.h"
#include "tools/commands/decode/interactive.h"
#include "tools/commands/decode/options.h"
#include "tools/commands/decode/prompt.h"
#include "tools/commands/decode/report.h"
#include "tools/commands/decode/resume.h"
#include "tools/commands/decode/show.h"
#include "tools/mpi/ranks.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/json.h"
#include "tools/terminal/units.h"
#include "tools/terminal/warning.h"

namespace keyhole::tools {
namespace {

Stops stops_of(const DecodeOptions& options, const LlamaConfig& model, const Turns* turns) {
  Stops stops;
  stops.most_tokens = options.most_tokens();
  stops.texts = options.stops;
  if (options.ignore_end) return stops;
  stops.end_tokens = turns != nullptr ? turns->end_tokens() : model.eos_tokens;
  return stops;
}

/// An error or Ctrl-C has ended an answer early: saves the session as it is then, where it was to be saved.
void save_what_there_is(const DecodeOptions& options, Conversation& conversation,
                        const SavedSession& about) {
  // Ranks save together, and the others may be elsewhere.
  if (options.save_session.empty() || conversation.tokens().empty() || ranks().size > 1) return;
  try {
    conversation.save(options.save_session, about);
    warn(options.save_session + " holds the session as it was when the answer ended early: " +
         format_count(conversation.tokens().size()) + " tokens");
  } catch (const std::exception& error) {
    warn("the session is not saved: " + std::string(error.what()));
  }
}

/// One answer, shown as it comes; ids where there is no tokenizer. The session is saved behind it, as one of `about`,
/// where that was asked for.
DecodeRun answer(const DecodeOptions& options, Conversation& conversation,
                 const Tokenizer* tokenizer, const Turns* turns, Conversation::Taken taken,
                 const SavedSession& about) {
  const LlamaConfig& model = conversation.runner().model().config;
  KeyholeCache& cache = conversation.cache();
  Decoder& decoder = conversation.decoder();
  const std::vector<uint32_t> prompt = conversation.tokens();
  const bool stream = options.json != "-";
  cache.reset_statistics();
  decoder.reset_times();
  OutputCheck errors(cache, conversation.spec().mode(), model);
  std::vector<float> logits;
  if (options.check) {
    const std::span<const float> first = conversation.sequence().logits();
    logits.assign(first.begin(), first.end());
    decoder.set_attention_hook(
        [&](uint32_t layer, const float* q, const float* out) { errors.measure(layer, q, out); });
  }

  DecodeRun run;
  run.taken = taken;
  Generator generator =
      conversation.answer(tokenizer, stops_of(options, model, turns),
                          turns != nullptr ? turns->answer_state() : DecodeState::in_text());
  const Clock::time_point start = Clock::now();
  try {
    while (const auto piece = generator.next()) {
      throw_if_interrupted();
      if (stream) show(tokenizer != nullptr ? piece->text : std::to_string(piece->token) + ' ');
    }
  } catch (...) {
    conversation.add(generator);
    save_what_there_is(options, conversation, about);
    throw;
  }
  run.decode_seconds = seconds_since(start);
  conversation.add(generator);
  run.tokens = generator.tokens();
  run.text = generator.text();
  run.stop = generator.reason();
  run.times = decoder.times();
  run.statistics = cache.statistics();
  if (conversation.spec().indexed()) run.index = cache.config().index;
  if (cache.audited()) run.audit = cache.audit();
  if (stream) show("\n\n");
  if (!options.save_session.empty()) conversation.save(options.save_session, about);
  if (options.check) {
    run.decode_seconds = run.times.total();  // without the time of the check
    decoder.set_attention_hook({});
    run.check = errors.result();
    compare_tokens(decoder, cache, prompt, logits, run.tokens, *run.check);
  }
  return run;
}

std::optional<Turns> turns_of(const DecodeOptions& options, const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return std::nullopt;
  if (!options.chat) return Turns(*tokenizer);
  return Turns(*tokenizer, load_chat(options.model), options.system);
}

std::optional<GpuMemoryPlan> plan_memory(DecodeOptions& options, size_t prompt_tokens,
                                         uint32_t capacity) {
  GpuMemoryRequest request;
  // What is typed later may be as long as the context.
  request.prompt = options.interactive ? capacity : prompt_tokens;
  request.session = true;
  request.context = capacity;
  request.specs = {options.index};
  request.budgets = {options.budget};
  return apply_gpu_memory(options.model, std::move(request), options.cache);
}

void decode(DecodeOptions options) {
  understand(options);
  if (!ranks().speaks()) options.json.clear();
  if (!options.json.empty()) check_writable(options.json);
  if (!options.save_session.empty()) check_session_path(options.save_session);
  // Before gigabytes of weights are read.
  const std::optional<SavedSession> saved = find_session(options);
  const LlamaConfig model = load_llama_config(model_folder(options.model) / "config.json");
  set_kv_dtype(options.cache, model);
  name_prefill_budgets(options.model, options.cache);
  // Token ids are what a model without a tokenizer can be given.
  const bool has_text = options.interactive || options.chat || !options.stops.empty() ||
                        (options.has_prompt() && options.token_file.empty());
  const auto tokenizer =
      has_text ? load_tokenizer(options.model, model) : find_tokenizer(options.model, model);
  const std::optional<Turns> turns = turns_of(options, tokenizer.get());
  Prompt prompt = make_prompt(options, tokenizer.get(), turns ? &*turns : nullptr,
                              saved ? saved->tokens : std::vector<uint32_t>());
  if (options.turn != 0 && options.turn >= prompt.tokens.size()) {
    throw UsageError("--turn is " + std::to_string(options.turn) +
                     "; allowed: fewer than the prompt's " + std::to_string(prompt.tokens.size()) +
                     " tokens");
  }
  const uint32_t capacity = capacity_of(options, model, prompt.tokens.size());
  // A dialogue may go on until its session is full.
  const bool may_fill = options.interactive && !options.context.empty();
  warn_of_context(
      model, std::max<uint64_t>(std::max(prompt.tokens.size(), saved ? saved->tokens.size() : 0) +
                                    options.most_tokens(),
                                may_fill ? capacity : 0));
  const std::optional<GpuMemoryPlan> memory = plan_memory(options, prompt.tokens.size(), capacity);
  const SavedSession about = about_session(options);

  Runner runner = make_runner(options.model, options.cache.threads);
  options.cache.device = runner.session_device(options.cache.cache_device);
  const std::unique_ptr<Conversation> conversation =
      saved ? resume(options, runner, *saved) : begin(options, runner, capacity);

  if (prompt.tokens.empty() && saved) prompt.tokens = saved->tokens;
  Conversation::Taken taken;
  TurnCost turn;
  if (!prompt.tokens.empty()) {
    taken = conversation->take({prompt.tokens.begin(), prompt.tokens.end() - options.turn});
  }
  if (options.turn != 0) turn = conversation->take_turn(prompt.tokens);
  if (options.interactive) {
    try {
      interact(*conversation, *tokenizer, *turns,
               {stops_of(options, model, &*turns), options.chat && options.has_prompt(), about});
    } catch (...) {
      save_what_there_is(options, *conversation, about);
      throw;
    }
    if (options.save_session.empty()) return;
    if (conversation->tokens().empty()) {
      warn("nothing was said: " + options.save_session + " is not written");
    } else {
      conversation->save(options.save_session, about);
    }
    return;
  }
  DecodeRun run =
      answer(options, *conversation, tokenizer.get(), turns ? &*turns : nullptr, taken, about);
  run.memory = memory;
  run.turn = turn;
  if (options.json != "-") show(report_text(options, runner, run, prompt));
  if (!options.json.empty()) {
    write_json(options.json, report_json(options, runner, run, prompt, tokenizer != nullptr));
  }
}

}  // namespace

void add_decode(CLI::App& keyhole) {
  auto options = std::make_shared<DecodeOptions>();
  CLI::App* command = keyhole.add_subcommand(
      "decode", "Continue a prompt with a model whose KV cache lies behind an index");
  add_decode_options(*command, *options);
  command->footer(examples(
      {"keyhole decode --task kv --length 32k --generate 16 --index ivf --check",
       "keyhole decode --task kv --length 32k --index ivf:probe=32 --attend scored --check",
       "keyhole decode --task kv --length 32k --index ivf --tail second --target error=0.05 "
       "--check",
       "keyhole decode --task kv --length 32k --budgets budgets.json --check",
       "keyhole decode --prompt book.txt --generate 200 --temperature 0.8 --top-p 0.95 --seed 7",
       "keyhole decode --prompt book.txt --save-session book.session --generate 1",
       "keyhole decode --task kv --length 64k --turn 4096 --prefill sampled:from=0",
       "keyhole decode --load-session book.session --interactive",
       "keyhole decode --model DIR --interactive --chat --temperature 0.7 --top-p 0.9",
       "keyhole decode --model DIR --tokens ids.txt --generate 64 --index exact"}));
  command->callback([options] { decode(*options); });
}

}  // namespace keyhole::tools
