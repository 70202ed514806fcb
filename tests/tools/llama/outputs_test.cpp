// Where results go: refused before the work where they cannot go there, and never lost in silence.
#include <gtest/gtest.h>
#include <sys/stat.h>

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

}  // namespace
}  // namespace keyhole::tools
