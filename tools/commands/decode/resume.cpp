#include "tools/commands/decode/resume.h"

#include "runtime/files/settings.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/rounded_cache.h"
#include "tools/llama/rope.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

/// Index, budget and tokens of a session, as the options of the command line would have them.
void take_over(const keyhole_session_config& config, DecodeOptions& options) {
  options.cache.sink = config.sink;
  options.cache.window = config.window;
  options.cache.kv_host = word_of_number(setting(kSessionSettings, "kv_host"), config.kv_host);
  if (options.attends_anew) return;
  options.index = {config.index, config.budgets == nullptr ? "" : config.budgets};
  if (config.mode == KEYHOLE_MODE_EXACT) options.index = {"exact", ""};
  if (config.mode == KEYHOLE_MODE_RESIDENT) options.index = {"none", ""};
  options.budget = choice_of(config.budget);
}

}  // namespace

std::optional<SavedSession> find_session(DecodeOptions& options) {
  if (options.load_session.empty()) return std::nullopt;
  SavedSession saved = read_session(options.load_session);
  const std::filesystem::path folder = model_folder(options.model);
  check_session(saved, options.load_session, model_name(options.model), identify_model(folder),
                load_llama_config(folder / "config.json").vocab_size);
  options.cache.kv_dtype = saved.kv_dtype;
  return saved;
}

std::unique_ptr<Conversation> begin(const DecodeOptions& options, Runner& runner,
                                    uint32_t capacity) {
  const LlamaConfig& model = runner.model().config;
  CacheFlags flags = options.cache;
  flags.model = model_name(options.model);
  KeyholeCache cache =
      options.index.format()
          ? RoundedCacheMaker().make(model, flags, capacity, options.index)
          : make_cache(model, options.cache, capacity, {options.index}, {options.budget});
  return std::make_unique<Conversation>(runner, std::move(cache), options.index, options.budget,
                                        options.sampling);
}

std::unique_ptr<Conversation> resume(DecodeOptions& options, Runner& runner,
                                     const SavedSession& saved) {
  KeyholeCacheOptions engine;
  engine.threads = options.cache.threads;
  engine.ranks = cache_ranks(options.cache.parallel, options.cache.device);
  engine.device = options.cache.device;
  engine.kv_dtype = dtype_of(saved.kv_dtype);
  engine.classifiers = options.cache.classifiers;
  const KeyholeCache::Contents contents = contents_of(saved);
  KeyholeCache cache =
      KeyholeCache::load(runner.model().config, engine, saved.kv.string(), &contents);
  const keyhole_session_config config = cache.config();
  take_over(config, options);
  const uint32_t held = cache.layer_tokens(0).total;
  if (held != saved.taken) {
    throw std::runtime_error(saved.kv.string() + ": holds " + std::to_string(held) + " tokens, " +
                             options.load_session + " says " + std::to_string(saved.taken));
  }
  HeldConversation has{{saved.tokens.begin(), saved.tokens.begin() + saved.taken},
                       saved.rope_tokens.value_or(saved.taken)};
  const bool knows_turns = saved.rope_tokens || !has_longrope(runner.model().config);
  if (!knows_turns) {
    // Nothing says whether its keys have the short or the long factors.
    cache.truncate(0);
    has = {};
  }
  auto conversation = std::make_unique<Conversation>(
      runner, std::move(cache), options.index, options.budget, options.sampling, std::move(has),
      !options.attends_anew && knows_turns);
  conversation->go_on(saved.sampler);
  return conversation;
}

SavedSession about_session(const DecodeOptions& options) {
  SavedSession about;
  if (!options.interactive && options.save_session.empty()) return about;
  about.model = model_name(options.model);
  about.identity = identify_model(model_folder(options.model));
  about.kv_dtype = options.cache.kv_dtype;
  return about;
}

}  // namespace keyhole::tools
