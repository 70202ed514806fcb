#include "tools/commands/common/attend_spec.h"

#include "tools/commands/common/options.h"
#include "tools/terminal/clock.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {

keyhole_mode AttendSpec::mode() const {
  const NamedWay* way = find_way(text);
  return way == nullptr ? KEYHOLE_MODE_INDEXED : way->mode;
}

std::optional<KvFormat> AttendSpec::format() const {
  const NamedWay* way = find_way(text);
  return way == nullptr ? std::nullopt : way->format;
}

KeyholeCache make_cache(const LlamaConfig& model, const CacheFlags& flags, uint32_t max_tokens,
                        const std::vector<AttendSpec>& specs,
                        const std::vector<BudgetChoice>& choices) {
  KeyholeCacheOptions options;
  options.max_tokens = max_tokens;
  options.sink = flags.sink;
  options.window = flags.window;
  options.threads = flags.threads;
  options.ranks = cache_ranks(flags.parallel, flags.device);
  options.device = flags.device;
  if (flags.kv_dtype != "auto") options.kv_dtype = dtype_of(flags.kv_dtype);
  options.kv_host = kv_host_of(flags.kv_host);
  options.dense_layers = flags.dense_layers;
  options.classifiers = flags.classifiers;
  options.tail_partition = common_partition(choices);
  options.settings = flags.settings;
  options.audit_share = flags.audit.share;
  options.audit_action = flags.audit.action_code();
  options.audit_bound = flags.audit.bound;
  std::string prefix;
  const auto make = [&] {
    KeyholeCache cache(model, options);
    for (const AttendSpec& spec : specs) {
      prefix = "--index " + spec.text + ": ";
      if (spec.indexed()) cache.set_index(spec.text);
    }
    prefix.clear();
    const std::string last = specs.empty() ? "" : specs.back().text;
    for (const BudgetChoice& choice : choices) {
      if (!choice.reads_codes() || has_codes(last)) cache.set_budget(choice.budget());
    }
    return cache;
  };
  try {
    KeyholeCache cache = make();
    if (flags.budgets.empty()) return cache;
    // The list has one way more, because it begins with the budgets; heads that these do not name have the first spec
    // and choice.
    options.budgets = flags.budgets;
    options.index = specs.front().text;
    if (!choices.empty()) options.budget = for_index(choices.front(), options.index).budget();
    return {model, options};
  } catch (const LibraryError& error) {
    if (error.status() == KEYHOLE_INVALID_ARGUMENT) throw UsageError(prefix + error.what());
    throw;
  }
}

double build_with_progress(KeyholeCache& cache, const std::string& what) {
  Progress bar("build of " + what);
  const keyhole_progress_fn show = [](void* user, double fraction, const char*) -> int32_t {
    static_cast<Progress*>(user)->update(fraction);
    return interrupted() ? 1 : 0;
  };
  const Clock::time_point start = Clock::now();
  try {
    cache.build(show, &bar);
  } catch (const LibraryError&) {
    throw_if_interrupted();  // what the library calls cancelled
    throw;
  }
  return seconds_since(start);
}

double apply_spec(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice) {
  cache.set_mode(spec.mode(), 0);
  if (!spec.budgets.empty()) return build_with_progress(cache, "the budgets' indexes");
  // The index first: a budget may ask for what only that has.
  if (spec.indexed()) cache.set_index(spec.text);
  cache.set_budget(choice.budget());
  return spec.indexed() ? build_with_progress(cache, spec.text) : 0.0;
}

double apply_budget(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice) {
  cache.set_budget(choice.budget());
  return choice.needs_partitions() ? build_with_progress(cache, "partitions of " + spec.text) : 0.0;
}

}  // namespace keyhole::tools
