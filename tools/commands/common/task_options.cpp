#include "tools/commands/common/task_options.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "tools/commands/common/bundled_model.h"
#include "tools/commands/common/prompt_text.h"
#include "tools/tasks/copy_task.h"
#include "tools/tasks/kv_task.h"
#include "tools/tasks/passkey_task.h"
#include "tools/tasks/ruler_task.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

/// The kind of a task in the manner of RULER.
std::optional<RulerKind> ruler_kind(const std::string& task) {
  if (task == "needles") return RulerKind::needles;
  if (task == "variables") return RulerKind::variables;
  if (task == "words") return RulerKind::words;
  return std::nullopt;
}

}  // namespace

void add_task_options(CLI::App& command, TaskOptions& options,
                      const std::vector<std::string>& tasks) {
  const auto has = [&tasks](const char* task) {
    return std::find(tasks.begin(), tasks.end(), task) != tasks.end();
  };
  std::string help = "Make the prompt: kv (key=value lines) or passkey (numbers hidden in prose)";
  if (has("copy")) help += " or copy (prose, passages of which are to be continued)";
  if (has("needles")) {
    help +=
        ", needles (several numbers of a name), variables (chains of assignments), words (the most "
        "frequent of a list)";
  }
  if (has("text")) help += "; or text: take it from a file";
  if (has("ruler")) help += "; or ruler: benchmarks with a prompt for each question, see --ruler";
  command.add_option("--task", options.task, help)->check(CLI::IsMember(tasks));
  command
      .add_option(
          "--length", options.length,
          std::string("Tokens of the task's context, by the model's vocabulary, e.g. 8192 ") +
              (has("ruler") ? "or 32k; of ruler with the answer, and several: 8k,16k" : "or 32k"))
      ->type_name("N")
      ->capture_default_str();
  command.add_option("--seed", options.seed, "Seed of the task")->capture_default_str();
  command
      .add_option("--haystack", options.haystack,
                  "Text file of the prose of tasks that have some; default: the bundled prose")
      ->type_name("FILE");
}

uint32_t length_of(const TaskOptions& options) {
  const uint64_t length = parse_tokens(options.length);
  if (length < 64 || length > (uint64_t{1} << 26)) {
    throw UsageError("--length is " + std::to_string(length) + "; allowed: 64 to 67108864");
  }
  return static_cast<uint32_t>(length);
}

std::string haystack_of(const TaskOptions& options) {
  return read_text_file(options.haystack.empty() ? bundled_model_folder() / "haystack.txt"
                                                 : std::filesystem::path(options.haystack));
}

Task make_task(const TaskOptions& options, size_t context_bytes, size_t questions) {
  if (options.task == "kv") {
    return make_kv_task(
        {.context_bytes = context_bytes, .questions = questions, .seed = options.seed});
  }
  const std::string haystack = options.task == "words" ? "" : haystack_of(options);
  if (const auto kind = ruler_kind(options.task)) {
    return make_ruler_task({.kind = *kind,
                            .context_bytes = context_bytes,
                            .questions = questions,
                            .seed = options.seed,
                            .haystack = haystack});
  }
  return make_passkey_task({.context_bytes = context_bytes,
                            .questions = questions,
                            .seed = options.seed,
                            .haystack = haystack});
}

size_t max_question_bytes(const std::string& task) {
  return task == "kv" ? kKvQuestionBytes : kMaxPasskeyQuestionBytes;
}

size_t fitting_questions(const std::string& task, size_t context_bytes, size_t wanted) {
  const size_t most = task == "kv"       ? min_kv_lines(context_bytes)
                      : task == "copy"   ? max_copy_passages(context_bytes)
                      : ruler_kind(task) ? max_ruler_questions(context_bytes)
                                         : max_passkeys(context_bytes);
  return std::max<size_t>(1, std::min(wanted, most));
}

}  // namespace keyhole::tools
