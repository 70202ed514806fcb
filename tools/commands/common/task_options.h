// The options of commands that make a prompt of a task, and the tasks that they make.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/tasks/task.h"

namespace keyhole::tools {

/// The options `--task`, `--length`, `--seed`, `--haystack`.
struct TaskOptions {
  std::string task;  ///< one of those that the command has, or empty
  std::string length = "8192";
  uint64_t seed = 1;
  std::string haystack;  ///< a file; empty: the bundled prose
};
void add_task_options(CLI::App& command, TaskOptions& options,
                      const std::vector<std::string>& tasks = {"kv", "passkey"});

/// --length as a number of tokens. Throws UsageError.
[[nodiscard]] uint32_t length_of(const TaskOptions& options);

/// The prose of --haystack, or the bundled prose.
[[nodiscard]] std::string haystack_of(const TaskOptions& options);
/// A task whose context has `context_bytes` (kv: a few less). Throws UsageError.
[[nodiscard]] Task make_task(const TaskOptions& options, size_t context_bytes, size_t questions);
/// The number of bytes of the longest prompt of a question of this task.
[[nodiscard]] size_t max_question_bytes(const std::string& task);
/// `wanted`, or fewer if the context is too short for so many different questions.
[[nodiscard]] size_t fitting_questions(const std::string& task, size_t context_bytes,
                                       size_t wanted);

}  // namespace keyhole::tools
