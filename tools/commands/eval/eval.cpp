// keyhole eval: how many questions about a long context a model answers with each way to attend, how well it predicts a
// text, how far its predictions are from those by exact attention, or how many tokens of a draft it accepts.
#include <memory>
#include <string>

#include "tools/commands/commands.h"
#include "tools/commands/eval/tasks.h"
#include "tools/mpi/ranks.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

/// Refuses options that other tasks, or a run of no model, would pass over.
void check_ruler_options(const CLI::App& command, const std::string& task) {
  const auto is_given = [&](const char* option) { return command.count(option) != 0; };
  for (const char* option : {"--samples", "--write-prompts"}) {
    if (task != "ruler" && is_given(option)) {
      throw UsageError(std::string(option) + " is of --task ruler");
    }
  }
  for (const char* option : {"--json", "--html"}) {
    if (is_given("--write-prompts") && is_given(option)) {
      throw UsageError(std::string(option) +
                       " is of runs of a model, and --write-prompts runs none");
    }
  }
}

void eval(const EvalOptions& options) {
  const std::string& task = options.task.task;
  if (task.empty())
    throw UsageError(
        "--task is missing; allowed: kv, passkey, needles, variables, words, copy, text, kld, "
        "drafts, ruler");
  if (task != "ruler" && options.ruler.given())
    throw UsageError("--ruler and --data are of --task ruler");
  if (task != "drafts" && options.drafts.given())
    throw UsageError("--draft and --ahead are of --task drafts");
  if (task != "kld" && options.base.given())
    throw UsageError("--base and --chunks are of --task kld");
  if (task != "kld" && options.bins > 1) throw UsageError("--bins is of --task kld");
  const bool is_text = task == "text" || task == "kld" || task == "drafts";
  if ((is_text || task == "copy") && options.chat)
    throw UsageError("--chat is of tasks with questions: kv, passkey, needles, variables, words");
  if (!is_text && (!options.prompt_file.empty() || !options.token_file.empty()))
    throw UsageError("--prompt and --tokens are of --task text, --task kld and --task drafts");
  if (task == "text") return eval_text(options);
  if (task == "kld") return eval_kld(options);
  if (task == "drafts") return eval_drafts(options);
  if (task == "copy") return eval_copy(options);
  if (task == "ruler") return eval_ruler(options);
  eval_questions(options);
}

}  // namespace

void add_eval(CLI::App& keyhole) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command = keyhole.add_subcommand("eval",
                                             "Count right answers about a long context, or measure "
                                             "how well a text is predicted, by index");
  add_eval_options(*command, *options);
  command->callback([options, command] {
    check_kld_base(*command, options->base);
    check_ruler_options(*command, options->task.task);
    if (!ranks().speaks()) options->json = options->html = "";
    name_prefill_budgets(options->model, options->cache);
    eval(*options);
  });
}

}  // namespace keyhole::tools
