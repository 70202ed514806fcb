// What all kinds of eval do alike: they load the model, run a prompt (or one after the other) for all ways to attend,
// and frame the result.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/eval/caches.h"
#include "tools/commands/eval/ways.h"

namespace keyhole::tools {

class EvalRun {
 public:
  /// Reads the ways to attend, and loads the model. Throws UsageError for options that mean nothing.
  explicit EvalRun(const EvalOptions& options);

  [[nodiscard]] const LlamaConfig& model() const { return runner_.model().config; }
  [[nodiscard]] Runner& runner() { return runner_; }

  /// Runs the prompt once into caches with room for `more` tokens behind it. Call it before the functions that
  /// follow. Another prompt takes the place of the one before; the seconds of all prompts are added.
  void prefill(const std::vector<uint32_t>& prompt, uint32_t more);
  /// Calls `run` with each way to attend and the cache that has been made to attend in that way.
  void for_each_way(const std::function<void(const EvalWay&, KeyholeCache&)>& run);

  /// Prints a heading, which says what was asked (`what`), and `result`; nothing where the JSON takes standard
  /// output.
  void print(const std::string& what, const std::string& result);
  /// Whether a file is asked for.
  [[nodiscard]] bool writes() const { return !options_.json.empty() || !options_.html.empty(); }
  /// The head of the file, see eval_header().
  [[nodiscard]] nlohmann::ordered_json header();
  /// Writes the whole result to the files that were asked for.
  void write(const nlohmann::ordered_json& document) const;

 private:
  EvalOptions options_;  // with the device and the dtype of this machine and model in place of auto
  std::vector<BudgetChoice> budgets_;
  std::vector<AttendSpec> specs_;
  std::optional<GpuMemoryPlan>
      memory_;  ///< with --gpu-memory, which limits the session of options_
  Runner runner_;
  RoundedCacheMaker rounded_;
  std::optional<EvalCaches> caches_;
  size_t prompt_tokens_ = 0;
  double prefill_seconds_ = 0.0;
};

}  // namespace keyhole::tools
