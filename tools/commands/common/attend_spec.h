// Ways to attend as the command line names them, caches that can attend in them, and their builds with a progress bar.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/budget_choice.h"
#include "tools/commands/common/cache_options.h"
#include "tools/commands/common/ways.h"

namespace keyhole::tools {

/// A way to attend: an index spec, the name of one of named_ways(), or the file of --budgets.
struct AttendSpec {
  std::string text;
  std::string
      budgets;  ///< the file, which the cache began with; `text` is of heads that it does not name
  [[nodiscard]] keyhole_mode mode() const;
  /// The format through which the way's K and V pass, if they do: such a way has a cache of its own, see
  /// rounded_cache.h.
  [[nodiscard]] std::optional<KvFormat> format() const;
  [[nodiscard]] bool indexed() const { return mode() == KEYHOLE_MODE_INDEXED; }
  /// The way for tables: the spec, or the file.
  [[nodiscard]] const std::string& shown() const { return budgets.empty() ? text : budgets; }
  /// The way with the index in effect, "auto: codes:k=4,v=4". in_effect empty, or the same text: there is nothing to
  /// add.
  [[nodiscard]] std::string shown(const std::string& in_effect) const {
    return shown() + (in_effect.empty() || in_effect == text ? "" : ": " + in_effect);
  }
};

/// Makes an empty cache after checking every spec, so that minutes of prefill do not end in a misspelt index. `specs`
/// begins with that of the budgets where there are any: the first is applied. Throws UsageError with the library's
/// text for flags and specs that it refuses.
[[nodiscard]] KeyholeCache make_cache(const LlamaConfig& model, const CacheFlags& flags,
                                      uint32_t max_tokens, const std::vector<AttendSpec>& specs,
                                      const std::vector<BudgetChoice>& choices);

/// Builds the indexes of pending tokens, with a progress bar that names it. Returns its seconds.
double build_with_progress(KeyholeCache& cache, const std::string& what);

/// Makes the cache attend by `spec`, with the budget of `choice` for every head (not for --budgets, whose heads have
/// their own). For an index it sets and builds it with a progress bar. Returns the seconds of the build, 0 for exact
/// and none.
double apply_spec(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice);
/// Sets another budget for the same indexes. Returns the seconds of building partitions that it may need.
double apply_budget(KeyholeCache& cache, const AttendSpec& spec, const BudgetChoice& choice);

}  // namespace keyhole::tools
