// What the kinds of `keyhole eval` share: the options, the ways to attend that they compare, and what one way
// cost.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/decoding.h"
#include "tools/commands/common/options.h"

namespace keyhole::tools {

struct EvalOptions {
  ModelOptions model;
  TaskOptions task;
  CacheFlags cache;
  std::string prompt_file;  ///< of task text; empty: the bundled prose
  std::string token_file;   ///< of task text, in place of a prompt
  uint32_t bytes = 2000;    ///< of task text: decoded after the context
  std::vector<std::string> indexes;
  std::vector<uint32_t> ks{100};
  BudgetLists budgets;
  uint32_t questions = 0;  ///< 0: the task's usual number
  std::string json;
};

/// One index (or exact, none, the file of --budgets) with one budget, and what decoding with them took.
struct EvalWay {
  AttendSpec spec;
  BudgetChoice budget;
  double build_seconds = 0.0;
  double index_bytes = 0.0;
  double scan_fraction = 0.0;  ///< NaN where nothing was indexed
  double keys_attended = 0.0;  ///< offloaded tokens per query head and layer step
  double bytes_read = 0.0;     ///< of host memory, per token
  StepTimes times;
  std::optional<keyhole_audit> audit;

  /// Whether all heads have the budget of the command line.
  [[nodiscard]] bool has_budget() const { return spec.indexed() && spec.budgets.empty(); }
  [[nodiscard]] std::string name() const {
    return spec.shown() + (has_budget() ? ", " + budget.text() : "");
  }
  [[nodiscard]] double tokens_per_second() const {
    return static_cast<double>(times.steps) / times.total();
  }
  [[nodiscard]] double attention_ms() const {
    return 1e3 * times.attention / static_cast<double>(times.steps);
  }
};

/// Every way to attend with every --k (topk:K has its own), tail and target.
[[nodiscard]] std::vector<BudgetChoice> all_budgets(const EvalOptions& options);
/// --budgets first, as the cache begins with it, then every --index. Throws UsageError where there is none.
[[nodiscard]] std::vector<AttendSpec> all_specs(const EvalOptions& options);
/// Brings the cache to attend in each of their ways in turn, and calls `run` with it.
void for_each_way(KeyholeCache& cache, const std::vector<AttendSpec>& specs,
                  const std::vector<BudgetChoice>& budgets,
                  const std::function<void(const EvalWay&)>& run);

/// Fills in what the steps since the last reset cost.
void measure_way(KeyholeCache& cache, const Decoder& decoder, const LlamaConfig& model,
                 EvalWay& way);

/// The columns of a way in a table: what it is, and behind the result what it cost.
[[nodiscard]] std::vector<std::string> way_cells(const EvalWay& way);
[[nodiscard]] std::vector<std::string> cost_cells(const EvalWay& way);
/// A line for each way that was audited.
[[nodiscard]] std::string audit_texts(const std::vector<const EvalWay*>& ways);

/// The result's JSON: what the way is, `result`, what the way cost.
[[nodiscard]] nlohmann::ordered_json to_json(const EvalWay& way,
                                             const nlohmann::ordered_json& result);
/// The head of the file: machine, model, shape of the cache.
[[nodiscard]] nlohmann::ordered_json eval_header(const EvalOptions& options, const Runner& runner,
                                                 const KeyholeCache& cache,
                                                 const keyhole_statistics& statistics,
                                                 size_t tokens, double prefill_seconds);

/// `--task text`: bits per byte of a real text, decoded after `length` tokens of it.
void eval_text(EvalOptions options);

}  // namespace keyhole::tools
