// Where results go: refused before the work where they cannot go there, and never lost in silence.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"

namespace keyhole::tools {
namespace {

std::vector<std::string> decode_of(const TemporaryFolder& folder,
                                   const std::vector<std::string>& more) {
  write_file(folder / "prompt", std::string("hello"));
  std::vector<std::string> args = {"decode",    "--prompt", folder / "prompt", "--generate", "2",
                                   "--threads", "1"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

TEST(Outputs, AreRefusedBeforeTheWork) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  const std::string nowhere = folder / "none" / "file";
  for (const auto& [option, path] : {std::pair<std::string, std::string>{"--json", nowhere},
                                     {"--save-session", nowhere},
                                     {"--save-session", folder / "fifo"}}) {
    const Outcome outcome = run_keyhole(decode_of(folder, {option, path}));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_EQ(outcome.out, "") << "the model has run";
    EXPECT_NE(outcome.err.find("cannot write " + path), std::string::npos) << outcome.err;
  }
  EXPECT_EQ(files_in(folder.path()), 2U);
}

TEST(SavedSessions, SampledAnswersGoOnAsInOneRun) {
  const TemporaryFolder folder;
  const auto tokens_of = [&](const std::string& source, const std::string& generated,
                             const std::string& session) {
    const Outcome outcome =
        run_keyhole({"decode", source == "prompt" ? "--prompt" : "--load-session", folder / source,
                     "--generate", generated, "--temperature", "0.9", "--seed", "7", "--threads",
                     "1", "--ignore-eos", "--save-session", folder / session});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return nlohmann::json::parse(read_file(folder / session))
        .at("tokens")
        .get<std::vector<uint32_t>>();
  };
  write_file(folder / "prompt", std::string("The river runs to the sea, and the sea"));
  const std::vector<uint32_t> whole = tokens_of("prompt", "24", "whole");
  const std::vector<uint32_t> half = tokens_of("prompt", "12", "half");
  EXPECT_EQ(half, std::vector<uint32_t>(whole.begin(), whole.end() - 12));
  EXPECT_EQ(tokens_of("half", "12", "both"), whole);
}

TEST(SavedSessions, MayHaveNamesThatAreNoUtf8) {
  const TemporaryFolder folder;
  const std::string name = (folder / "n\xff").string();
  EXPECT_EQ(run_keyhole(decode_of(folder, {"--save-session", name})).exit_code, 0);
  const Outcome again = run_keyhole({"decode", "--load-session", name, "--generate", "2",
                                     "--threads", "1", "--save-session", name});
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(run_keyhole({"decode", "--load-session", name, "--generate", "2"}).exit_code, 0);
  EXPECT_EQ(files_in(folder.path()), 3U) << "prompt, session, K and V";
}

}  // namespace
}  // namespace keyhole::tools
