#include "tools/commands/eval/caches.h"

namespace keyhole::tools {

EvalCaches::EvalCaches(const LlamaConfig& model, const EvalOptions& options, uint32_t max_tokens,
                       const std::vector<AttendSpec>& specs,
                       const std::vector<BudgetChoice>& budgets)
    : main_(make_cache(model, options.cache, max_tokens, specs, budgets)) {
  for (const AttendSpec& spec : specs) {
    if (const auto format = spec.format(); format && rounded_.count(*format) == 0) {
      rounded_.emplace(*format, make_rounded_cache(model, options.cache, max_tokens, spec));
    }
  }
}

double EvalCaches::prefill(Runner& runner, const std::vector<uint32_t>& tokens) {
  return prefill_prompt(runner, tokens, [this](const LayerChunk& chunk) {
    main_.prefill(chunk);
    for (auto& [format, cache] : rounded_) cache.prefill(chunk);
  });
}

KeyholeCache& EvalCaches::of(const AttendSpec& spec) {
  const auto format = spec.format();
  return format ? rounded_.at(*format) : main_;
}

}  // namespace keyhole::tools
