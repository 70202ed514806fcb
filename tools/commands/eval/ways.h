// What the tasks of `keyhole eval` share: ways to attend that they compare, and the cost of each, in cells and JSON.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/attend_spec.h"
#include "tools/commands/common/decoding.h"
#include "tools/commands/eval/options.h"
#include "tools/commands/eval/scores.h"
#include "tools/terminal/table.h"

namespace keyhole::tools {

/// A way to attend (an index, exact, none, or the file of --budgets) with one budget, and the cost of decoding with
/// it.
struct EvalWay {
  AttendSpec spec;
  BudgetChoice budget;
  std::string in_effect;  ///< the index that `auto` stands for; empty: the spec's own
  double build_seconds = 0.0;
  double index_bytes = 0.0;
  double scan_fraction = 0.0;  ///< NaN where nothing was indexed
  double keys_attended = 0.0;  ///< offloaded tokens per query head and layer step
  double bytes_read = 0.0;     ///< of host memory, per token
  StepTimes times;
  std::optional<keyhole_audit> audit;
  // Of a way that has a format, of full layers:
  double format_bits = 0.0;   ///< of a number that is in few bits, steps and zero points counted
  uint64_t format_bytes = 0;  ///< of K and V of the prompt
  double format_bits_in_all = 0;  ///< of a number of the prompt, with those that are in 16 bits

  /// Whether it attends as another system's cache would: its answers count, its times say nothing.
  [[nodiscard]] bool emulated() const { return spec.format().has_value(); }
  [[nodiscard]] bool is_exact() const {
    return spec.mode() == KEYHOLE_MODE_EXACT && spec.budgets.empty() && !emulated();
  }
  /// Whether all heads have the budget of the command line.
  [[nodiscard]] bool has_budget() const { return spec.indexed() && spec.budgets.empty(); }
  /// The way as text: "auto: codes:k=4,v=4", or as it was asked for.
  [[nodiscard]] std::string shown() const { return spec.shown(in_effect); }
  [[nodiscard]] std::string name() const {
    return shown() + (has_budget() ? ", " + budget.text() : "");
  }
  [[nodiscard]] double tokens_per_second() const {
    return static_cast<double>(times.steps) / times.total();
  }
  [[nodiscard]] double attention_ms() const {
    return 1e3 * times.attention / static_cast<double>(times.steps);
  }
};

/// Combines every way to attend with every --k (topk:K has its own), tail and target.
[[nodiscard]] std::vector<BudgetChoice> all_budgets(const EvalOptions& options);
/// The spec of --budgets first, because the cache begins with it, then every --index; without both exact and auto.
[[nodiscard]] std::vector<AttendSpec> all_specs(const EvalOptions& options);
/// The options with exact attention first among the ways, where it was not asked for.
[[nodiscard]] EvalOptions with_exact(EvalOptions options);
class EvalCaches;
/// Whether an index, one of so many, takes a budget: with several, --tail codes is meant for those that have codes.
[[nodiscard]] bool takes_budget(const BudgetChoice& choice, const AttendSpec& spec, size_t specs);

/// Makes the cache of each way attend in that way, and calls `run` with both.
void for_each_way(EvalCaches& caches, const std::vector<AttendSpec>& specs,
                  const std::vector<BudgetChoice>& budgets,
                  const std::function<void(const EvalWay&, KeyholeCache&)>& run);

/// Fills in the bits of a cache in few bits that holds `tokens` tokens; nothing of other ways.
void measure_format(const LlamaConfig& model, size_t tokens, EvalWay& way);
/// Fills in these and the cost of the steps since the last reset, after a prompt of `tokens` tokens.
void measure_way(KeyholeCache& cache, const Decoder& decoder, const LlamaConfig& model,
                 size_t tokens, EvalWay& way);

/// The row of exact attention, with which the others are compared; null where it was not asked for.
template <class Row>
[[nodiscard]] const Row* find_exact(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    if (row.way.is_exact()) return &row;
  }
  return nullptr;
}

/// The columns of a table of ways, with those of the result between what a way is and what it cost.
[[nodiscard]] std::vector<Table::Column> way_columns(std::vector<Table::Column> result);
/// The cells of a way in a table: what it is, and behind the result what it cost.
[[nodiscard]] std::vector<std::string> way_cells(const EvalWay& way);
[[nodiscard]] std::vector<std::string> cost_cells(const EvalWay& way);
/// A line about an emulated way; "" if it is not emulated, or not audited.
[[nodiscard]] std::string emulation_text(const EvalWay& way);
[[nodiscard]] std::string audit_lines(const EvalWay& way);
/// The difference as text: "+0.0012 +- 0.0004", or "-" for exact attention itself and where it was not asked for.
[[nodiscard]] std::string above_exact_cell(const std::optional<Difference>& difference);
/// The swaps as text: "2 / 4", or "-" as in above_exact_cell().
[[nodiscard]] std::string swaps_cell(const std::optional<Swaps>& swaps);
/// The note below a table with swaps.
inline constexpr const char* kSwapsNote =
    "lost / won: right with exact attention of this run and wrong here / the other way round\n";
/// The notes below a table: a line for each emulated way, some for each audited one.
template <class Row>
[[nodiscard]] std::string way_notes(const std::vector<Row>& rows) {
  std::string text;
  for (const Row& row : rows) text += emulation_text(row.way);
  for (const Row& row : rows) text += audit_lines(row.way);
  return text;
}

/// The JSON of a way: what it is, `result`, what it cost. This is no overload of to_json, because the JSON library
/// has its own of two arguments in the namespace of the second, and some of its versions (3.11.3) do not compile
/// where they are tried.
[[nodiscard]] nlohmann::ordered_json way_json(const EvalWay& way,
                                              const nlohmann::ordered_json& result);
/// The head of the file: machine, model, shape of the cache.
[[nodiscard]] nlohmann::ordered_json eval_header(const EvalOptions& options, const Runner& runner,
                                                 const KeyholeCache& cache,
                                                 const keyhole_statistics& statistics,
                                                 size_t tokens, double prefill_seconds,
                                                 const TurnCost& turn);

/// The first line of a result: what was asked (`what`), and how.
[[nodiscard]] std::string eval_heading(const std::string& what, const EvalOptions& options,
                                       const Runner& runner, const keyhole_statistics& statistics,
                                       double prefill_seconds, const TurnCost& turn);

}  // namespace keyhole::tools
