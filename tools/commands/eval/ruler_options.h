// The options of `eval --task ruler`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/tasks/ruler/tasks.h"

namespace keyhole::tools {

struct RulerOptions {
  std::vector<std::string> tasks;  ///< names; empty: those of RULER that need no data
  std::vector<std::string> data;   ///< files of SQuAD and HotpotQA
  uint32_t samples = 20;           ///< prompts of each task and length
  std::string prompts;             ///< a file that takes the prompts, with which no model is run
  double bytes_per_token = 0.0;    ///< of these prompts, in place of a tokenizer; 0: the tokenizer

  [[nodiscard]] bool given() const { return !tasks.empty() || !data.empty() || !prompts.empty(); }
};

/// Adds `--ruler`, `--data`, `--samples`, `--write-prompts` and `--bytes-per-token`.
void add_ruler_options(CLI::App& command, RulerOptions& options);

/// The tasks that were asked for, in that order.
[[nodiscard]] std::vector<const ruler::TaskInfo*> tasks_of(const RulerOptions& options);

/// The lengths of `--length`, ascending, e.g. "8k,16k". Throws UsageError for one that is no length.
[[nodiscard]] std::vector<uint32_t> lengths_of(const std::string& lengths);

}  // namespace keyhole::tools
