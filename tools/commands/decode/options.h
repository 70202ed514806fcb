// The command line of decode.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/attend_spec.h"
#include "tools/commands/common/cache_options.h"
#include "tools/commands/common/model_options.h"
#include "tools/commands/common/task_options.h"
#include "tools/generation/sampler.h"

namespace keyhole::tools {

struct DecodeOptions {
  ModelOptions model;
  TaskOptions task;
  CacheFlags cache;
  std::string prompt_file;
  std::string token_file;
  std::optional<uint32_t> generate;  ///< absent: 64, of an interactive answer 512
  std::string context;               ///< empty: chosen by capacity_of()
  uint32_t turn = 0;         ///< tokens of the prompt, the last ones, that come behind its build
  SamplingOptions sampling;  ///< its seed is the task's
  std::vector<std::string> stops;
  bool ignore_end = false;
  bool interactive = false;
  bool chat = false;
  std::string system;  ///< of a chat
  std::string load_session, save_session;
  AttendSpec index{kAutoIndex, ""};
  uint32_t k = 100;
  std::string attend_text = "topk";
  std::string tail_text;
  std::string target_text = "none";
  BudgetNumbers numbers;
  BudgetChoice budget;
  /// Whether --index or an option of the budget was given: then a loaded session does not keep its own.
  bool attends_anew = false;
  bool check = false;
  std::string json;

  [[nodiscard]] uint32_t most_tokens() const { return generate.value_or(interactive ? 512 : 64); }
  [[nodiscard]] bool has_prompt() const {
    return !prompt_file.empty() || !token_file.empty() || !task.task.empty();
  }
};

void add_decode_options(CLI::App& command, DecodeOptions& options);

/// Refuses options that do not go together, and parses index, budget and sampling from their texts. Throws
/// UsageError.
void understand(DecodeOptions& options);

/// The number of tokens that a new session is made for: --context, else what the prompt and one answer need, and
/// where turns or other runs may follow at least the context that the model was made for. Throws UsageError where
/// --context is too short.
[[nodiscard]] uint32_t capacity_of(const DecodeOptions& options, const LlamaConfig& model,
                                   size_t prompt_tokens);

/// Whether all heads have the budget of the command line.
[[nodiscard]] bool has_budget(const AttendSpec& spec);

}  // namespace keyhole::tools
