// The options of `keyhole eval`, of all its tasks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/commands/common/cache_options.h"
#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/model_options.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/task_options.h"
#include "tools/commands/eval/draft_options.h"
#include "tools/commands/eval/kld_base.h"
#include "tools/commands/eval/ruler_options.h"

namespace keyhole::tools {

struct EvalOptions {
  ModelOptions model;
  TaskOptions task;
  CacheFlags cache;
  std::string prompt_file;  ///< of tasks text, kld and drafts; empty: the bundled prose
  std::string token_file;   ///< of these tasks, in place of a prompt
  uint32_t bytes = 2000;    ///< of tasks text and kld: tokens decoded after the context
  uint32_t bins = 1;        ///< of task kld: equal parts of these tokens with figures of their own
  std::vector<std::string> indexes;
  std::vector<uint32_t> ks{100};
  BudgetLists budgets;
  uint32_t turn = 0;  ///< tokens of the prompt, the last ones, that come behind its build
  std::string turn_as = "prompt";  ///< or "steps"
  uint32_t questions = 0;          ///< 0: the task's usual number
  bool chat = false;               ///< in the model's chat template
  uint32_t answer_tokens = 64;
  RulerOptions ruler;
  DraftOptions drafts;
  KldBaseOptions base;
  std::string json, html;
};

/// Adds the options of all tasks, and the text below the help.
void add_eval_options(CLI::App& command, EvalOptions& options);

}  // namespace keyhole::tools
