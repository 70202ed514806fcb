#include "tools/commands/eval/caches.h"

#include <utility>

#include "tools/commands/common/ways.h"
#include "tools/commands/eval/ways.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

bool is_full(const AttendSpec& spec) { return spec.text == kFullWay && spec.budgets.empty(); }

/// A cache that offloads nothing.
KeyholeCache make_full_cache(const LlamaConfig& model, CacheFlags flags, uint32_t max_tokens) {
  flags.window = max_tokens;
  flags.budgets.clear();
  flags.classifiers.clear();
  return make_cache(model, flags, max_tokens, {}, {});
}

}  // namespace

EvalCaches::EvalCaches(const LlamaConfig& model, const EvalOptions& options, uint32_t max_tokens,
                       const std::vector<AttendSpec>& specs,
                       const std::vector<BudgetChoice>& budgets, RoundedCacheMaker& rounded)
    : main_(make_cache(model, options.cache, max_tokens, specs, budgets)),
      way_of_turn_(options.turn_as == "steps" ? TurnWay::steps : TurnWay::prompt) {
  for (const AttendSpec& spec : specs) {
    if (is_full(spec) && !full_ && options.cache.parallel.kind.empty()) {
      full_.emplace(make_full_cache(model, options.cache, max_tokens));
    }
    // A file of budgets says what heads attend, with whatever comes behind it; else the last index does.
    const bool is_file = !options.cache.budgets.empty();
    if (spec.indexed() && takes_budget(budgets.front(), spec, specs.size()) &&
        (!of_turn_ || !is_file)) {
      of_turn_ = spec;
      budget_of_turn_ = for_index(budgets.front(), spec.text);
    }
    if (const auto format = spec.format(); format && rounded_.count(*format) == 0) {
      rounded_.emplace(*format, rounded.make(model, options.cache, max_tokens, spec));
    }
  }
}

double EvalCaches::prefill(Runner& runner, const std::vector<uint32_t>& tokens, uint32_t turn) {
  if (turn >= tokens.size()) {
    throw UsageError("--turn is " + std::to_string(turn) + "; allowed: fewer than the prompt's " +
                     std::to_string(tokens.size()) + " tokens");
  }
  const auto before = static_cast<uint32_t>(tokens.size()) - turn;
  const double seconds = prefill_prompt(runner, {tokens.begin(), tokens.begin() + before},
                                        [this](const LayerChunk& chunk) {
                                          main_.prefill(chunk);
                                          if (full_) full_->prefill(chunk);
                                          for (auto& [format, cache] : rounded_)
                                            cache.prefill(chunk);
                                        });
  if (turn == 0) return seconds;
  if (of_turn_) {
    (void)apply_spec(main_, *of_turn_, budget_of_turn_);
  } else {
    main_.set_mode(KEYHOLE_MODE_EXACT, 0);  // no way has an index
  }
  const std::span last = std::span(tokens).subspan(before);
  turn_ = extend_by_turn(runner, main_, last, before, nullptr, way_of_turn_);
  if (full_) (void)extend_by_turn(runner, *full_, last, before, nullptr, way_of_turn_);
  for (auto& [format, cache] : rounded_) {
    (void)extend_by_turn(runner, cache, last, before, nullptr, way_of_turn_);
  }
  return seconds;
}

KeyholeCache& EvalCaches::of(const AttendSpec& spec) {
  if (full_ && is_full(spec)) return *full_;
  const auto format = spec.format();
  return format ? rounded_.at(*format) : main_;
}

}  // namespace keyhole::tools
