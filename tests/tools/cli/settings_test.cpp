// Every row of the table of settings can be set from the command line.
#include <gtest/gtest.h>

#include "tests/tools/cli/run_command.h"
#include "tools/commands/common/setting_options.h"

namespace keyhole::tools {
namespace {

std::string option_of(const Setting& row) {
  static const std::map<std::string, std::string> kOwn = {{"max_tokens", "--context"},
                                                          {"mode", "--index"},
                                                          {"budget", "--k"},
                                                          {"audit_share", "--audit"},
                                                          {"audit_action", "--audit-action"},
                                                          {"audit_bound", "--audit-bound"},
                                                          {"device_memory_limit", "--gpu-memory"},
                                                          // Of a budget.
                                                          {"top_k", "--k"},
                                                          {"min_weight", "--attend"},
                                                          {"error_target", "--target"},
                                                          {"mass_target", "--target"}};
  const auto own = kOwn.find(row.name);
  return own == kOwn.end() ? option_name(row) : own->second;
}

TEST(Settings, HaveAnOptionEach) {
  const std::string decode = run_keyhole({"decode", "--help"}).out;
  for (const auto& table : {kSessionSettings, kBudgetSettings}) {
    for (const Setting& row : table) {
      EXPECT_NE(decode.find("\n  " + option_of(row) + " "), std::string::npos) << option_of(row);
    }
  }
  for (const std::string command : {"eval", "compare", "bench-step"}) {
    const std::string help = run_keyhole({command, "--help"}).out;
    for (const Setting& row : kBudgetSettings) {
      EXPECT_NE(help.find("\n  " + option_of(row) + " "), std::string::npos)
          << command << " " << option_of(row);
    }
    EXPECT_NE(help.find("\n  --exact-rows "), std::string::npos) << command;
    if (command == "compare") continue;  // one index alone: no session
    for (const Setting& row : kSessionSettings) {
      if (has_own_option(row) ||
          (command == "bench-step" && row.name == std::string("training_queries")))
        continue;
      // bench-step has older names for some.
      if (command == "bench-step" && option_name(row).find("-memory") != std::string::npos)
        continue;
      if (command == "bench-step" && row.name == std::string("tail_partition")) continue;
      EXPECT_NE(help.find("\n  " + option_name(row) + " "), std::string::npos)
          << command << " " << option_name(row);
    }
  }
}

TEST(Settings, AreCheckedByTheirRows) {
  const auto error = [](const std::string& option, const std::string& value) {
    const Outcome outcome = run_keyhole({"decode", "--task", "kv", option, value});
    EXPECT_EQ(outcome.exit_code, 2) << option << " " << value;
    return outcome.err;
  };
  EXPECT_NE(error("--flush-block", "many").find("--flush-block is many, allowed: whole numbers"),
            std::string::npos);
  EXPECT_NE(error("--flush-block", "1.5").find("allowed"), std::string::npos);
  EXPECT_NE(error("--flush-block", "-1").find("allowed"), std::string::npos);
  EXPECT_NE(error("--tail-partition", "2").find("--tail-partition is 2, allowed: 4..1024"),
            std::string::npos);
  EXPECT_NE(error("--append-mode", "never").find("background"), std::string::npos);
  EXPECT_NE(error("--host-memory", "1 lot").find("1 lot"), std::string::npos);
  EXPECT_NE(error("--min-keys", "4").find("--tail"), std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
