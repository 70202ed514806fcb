// What all subcommands share: help, version, errors, exit codes, decoration.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/tools/cli/run_command.h"

namespace keyhole::tools {
namespace {

const char* const kCommands[] = {"bench-step", "calibrate", "compare", "decode",    "eval",
                                 "heads",      "plan",      "record",  "train-saap"};

TEST(Help, HasExamplesAtEveryLevel) {
  const Outcome top = run_keyhole({"--help"});
  EXPECT_EQ(top.exit_code, 0);
  EXPECT_EQ(top.err, "");
  EXPECT_NE(top.out.find("Examples:"), std::string::npos) << top.out;
  for (const char* code : {"Exit codes:\n", "\n    0  ", "\n    1  ", "\n    2  ", "\n  130  "}) {
    EXPECT_NE(top.out.find(code), std::string::npos) << code << top.out;
  }
  for (const std::string command : kCommands) {
    EXPECT_NE(top.out.find("  " + command + " "), std::string::npos) << top.out;
    const Outcome help = run_keyhole({command, "--help"});
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_NE(help.out.find("Examples:"), std::string::npos) << help.out;
    EXPECT_NE(help.out.find("\n  keyhole " + command + " "), std::string::npos) << help.out;
  }
}

TEST(Help, ListsTheIndexTypes) {
  const Outcome help = run_keyhole({"compare", "--help"});
  for (const char* type : {"flat", "ivf", "hnsw", "probe"}) {
    EXPECT_NE(help.out.find(type), std::string::npos) << type;
  }
}

TEST(Version, IsTheLibrarys) {
  const Outcome outcome = run_keyhole({"--version"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.out.rfind("keyhole 0.", 0), 0U) << outcome.out;
}

TEST(Errors, AreOneLineOnStandardError) {
  const std::vector<std::vector<std::string>> wrong = {
      {}, {"frobnicate"}, {"compare"}, {"plan", "--context", "many"}, {"eval", "--no-such-option"}};
  for (const auto& args : wrong) {
    const Outcome outcome = run_keyhole(args);
    const std::string name = args.empty() ? "nothing" : args.front();
    EXPECT_EQ(outcome.exit_code, 2) << name;
    EXPECT_EQ(outcome.out, "") << name;
    EXPECT_EQ(outcome.err.rfind("keyhole: error: ", 0), 0U) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
}

TEST(Errors, NameTheCommandsThatThereAre) {
  const std::string error = run_keyhole({"frobnicate"}).err;
  EXPECT_NE(error.find("\"frobnicate\""), std::string::npos) << error;
  for (const char* command : kCommands) EXPECT_NE(error.find(command), std::string::npos) << error;
}

TEST(Errors, PointToTheHelpOfTheirCommand) {
  EXPECT_NE(run_keyhole({"compare"}).err.find("keyhole compare --help"), std::string::npos);
  EXPECT_NE(run_keyhole({}).err.find("keyhole --help"), std::string::npos);
}

Outcome error_on_a_terminal(const std::map<std::string, std::string>& environment) {
  return run_keyhole({"frobnicate"}, environment, Command::Output::terminal);
}

TEST(Colour, IsForTerminalsThatWantIt) {
  const auto coloured = [](const Outcome& outcome) {
    EXPECT_NE(outcome.out.find("error:"), std::string::npos) << outcome.out;
    return outcome.out.find("\033[") != std::string::npos;
  };
  EXPECT_TRUE(coloured(error_on_a_terminal({{"TERM", "xterm"}})));
  EXPECT_FALSE(coloured(error_on_a_terminal({{"TERM", "xterm"}, {"NO_COLOR", "1"}})));
  EXPECT_TRUE(coloured(error_on_a_terminal({{"TERM", "xterm"}, {"NO_COLOR", ""}})));
  EXPECT_FALSE(coloured(error_on_a_terminal({{"TERM", "dumb"}})));
}

}  // namespace
}  // namespace keyhole::tools
