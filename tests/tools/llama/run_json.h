// What the tests of commands that run a model share: a command's JSON, and arguments added to others.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"

namespace keyhole::tools {

[[nodiscard]] inline std::vector<std::string> with(std::vector<std::string> args,
                                                   const std::vector<std::string>& more) {
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

/// Ids as text, as --tokens reads them.
[[nodiscard]] inline std::string ids_text(const std::vector<uint32_t>& tokens) {
  std::string text;
  for (const uint32_t token : tokens) text += std::to_string(token) + " ";
  return text;
}

/// `keyhole eval` of a task over token ids, exact in fp32 on the host, with a sink and a window that short prompts
/// leave.
[[nodiscard]] inline std::vector<std::string> eval_of_ids(const std::filesystem::path& model,
                                                          const std::filesystem::path& ids,
                                                          const std::string& task,
                                                          const std::string& length) {
  return {"eval", "--model",    model,  "--task",   task,  "--tokens",
          ids,    "--length",   length, "--window", "16",  "--sink",
          "4",    "--kv-dtype", "f32",  "--device", "host"};
}

/// Runs `keyhole ARGS MORE --json -`, which must succeed.
[[nodiscard]] inline nlohmann::json run_json(const std::vector<std::string>& args,
                                             const std::vector<std::string>& more = {}) {
  const Outcome outcome = run_keyhole(with(with(args, more), {"--json", "-"}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return nlohmann::json::parse(outcome.out);
}

}  // namespace keyhole::tools
