#include "tools/commands/eval/ruler_options.h"

#include <algorithm>

#include "tools/commands/common/number_check.h"
#include "tools/commands/common/task_options.h"
#include "tools/terminal/cli.h"

namespace keyhole::tools {
namespace {

bool is_usual(const ruler::TaskInfo& task) {
  return task.of_ruler &&
         (task.needs == ruler::Needs::nothing || task.needs == ruler::Needs::prose);
}

}  // namespace

void add_ruler_options(CLI::App& command, RulerOptions& options) {
  std::vector<std::string> names;
  for (const ruler::TaskInfo& task : ruler::all_tasks()) names.emplace_back(task.name);
  command
      .add_option("--ruler", options.tasks,
                  "Tasks of --task ruler, e.g. niah_single_1,vt: RULER's 13, three of "
                  "InfiniteBench; and what needles miss: turns, records, enumerate, mqar; default: "
                  "RULER's without qa_1 and qa_2, which need --data")
      ->delimiter(',')
      ->type_name("TASK,...")
      ->check(CLI::IsMember(names));
  command
      .add_option("--data", options.data,
                  "JSON file of SQuAD (for qa_1) or HotpotQA (for qa_2); repeatable")
      ->allow_extra_args(false)
      ->type_name("FILE");
  command
      .add_option("--samples", options.samples,
                  "Prompts of each task and length of --task ruler; RULER itself takes 500")
      ->check(CLI::Range(1U, 1U << 20))
      ->capture_default_str();
  CLI::Option* const prompts =
      command
          .add_option(
              "--write-prompts", options.prompts,
              "Write the prompts of --task ruler as JSON lines, with what is right, and run "
              "no model: for another program, e.g. tools/engines/llama.cpp/ruler")
          ->type_name("FILE");
  command
      .add_option(
          "--bytes-per-token", options.bytes_per_token,
          "Of --write-prompts: tokens are counted as so many bytes each, for a program with "
          "another tokenizer; default: the tokenizer of --model counts")
      ->needs(prompts)
      ->check(CLI::Range(0.1, 100.0))
      ->check(no_nan("0.1 to 100"));
}

std::vector<const ruler::TaskInfo*> tasks_of(const RulerOptions& options) {
  std::vector<const ruler::TaskInfo*> out;
  for (const std::string& name : options.tasks) {
    const ruler::TaskInfo* task = ruler::find_task(name);
    if (std::find(out.begin(), out.end(), task) == out.end()) out.push_back(task);
  }
  if (!options.tasks.empty()) return out;
  for (const ruler::TaskInfo& task : ruler::all_tasks()) {
    if (is_usual(task)) out.push_back(&task);
  }
  return out;
}

std::vector<uint32_t> lengths_of(const std::string& lengths) {
  std::vector<uint32_t> out;
  for (size_t begin = 0; begin <= lengths.size();) {
    const size_t end = std::min(lengths.find(',', begin), lengths.size());
    TaskOptions one;
    one.length = lengths.substr(begin, end - begin);
    out.push_back(length_of(one));
    begin = end + 1;
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace keyhole::tools
