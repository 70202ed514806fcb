// The caches behind the ways of an eval: one prefill of the prompt fills them all.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "tools/commands/common/decoding.h"
#include "tools/commands/common/rounded_cache.h"
#include "tools/commands/eval/options.h"

namespace keyhole::tools {

/// The caches. One serves exact, none and every index; full has one whose window has room for all tokens, so that they
/// stay where sink and window lie (ranks of several processes share the first one); ways that have a format have one
/// each, with K and V rounded as they enter it, or as they age. The prompt's own forward pass is exact for all of them,
/// so that only the way of decoding differs.
class EvalCaches {
 public:
  /// Makes empty caches for `max_tokens` tokens, those that have a format by `rounded`. Throws UsageError as
  /// make_cache() and RoundedCacheMaker::make() do.
  EvalCaches(const LlamaConfig& model, const EvalOptions& options, uint32_t max_tokens,
             const std::vector<AttendSpec>& specs, const std::vector<BudgetChoice>& budgets,
             RoundedCacheMaker& rounded);

  /// Runs the prompt, with a progress bar, except its last `turn` tokens, which follow by extend_by_turn() as
  /// EvalOptions::turn_as says, behind the build of the index of the main cache that is the last of the specs, with the
  /// first budget, or of the indexes of a file of budgets; exactly where no spec is an index. Returns its seconds.
  double prefill(Runner& runner, const std::vector<uint32_t>& tokens, uint32_t turn);
  /// The cost of the turn in the main cache; of no tokens where there is none.
  [[nodiscard]] const TurnCost& turn() const { return turn_; }

  /// The cache of exact, none and indexes.
  [[nodiscard]] KeyholeCache& main() { return main_; }
  [[nodiscard]] KeyholeCache& of(const AttendSpec& spec);

 private:
  KeyholeCache main_;
  std::optional<KeyholeCache> full_;
  std::map<KvFormat, KeyholeCache> rounded_;
  std::optional<AttendSpec> of_turn_;  ///< the index of a turn, and its budget
  BudgetChoice budget_of_turn_;
  TurnWay way_of_turn_;
  TurnCost turn_;
};

}  // namespace keyhole::tools
