// Runs the keyhole command that was built, or the one that KEYHOLE_COMMAND names, in a process of its own.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "tests/temporary_folder.h"

namespace keyhole::tools {

struct Outcome {
  int exit_code = 0;  ///< 128 + n where signal n ended it
  std::string out, err;
};

class Command {
 public:
  /// Where output goes. `terminal`: both outputs go to one pseudo-terminal, and come back as `out`. `dialogue`:
  /// standard input is that terminal, too, and typed keys send signals; otherwise it is `input`.
  enum class Output { files, terminal, dialogue };
  /// Starts `keyhole ARGS`, with the given variables added to an environment that decides nothing by itself.
  explicit Command(const std::vector<std::string>& args,
                   const std::map<std::string, std::string>& environment = {},
                   Output output = Output::files, const std::string& input = "");
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  /// Waits until the process has its handler for the signal, then sends it.
  void interrupt(int signal = SIGINT) const;
  [[nodiscard]] Outcome wait();

  /// Types keys in a dialogue: "\x03" is Ctrl-C and "\x04" is Ctrl-D.
  void type(const std::string& keys) const;
  /// Waits until the terminal shows `text` behind what was waited for before; returns what came up to its end. Throws
  /// std::runtime_error with all that was shown if the process ends, or shows nothing more for two minutes.
  std::string expect(const std::string& text);

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
  int terminal_ = -1;
  std::string shown_;
  size_t expected_ = 0;  ///< of shown_
};

[[nodiscard]] Outcome run_keyhole(const std::vector<std::string>& args,
                                  const std::map<std::string, std::string>& environment = {},
                                  Command::Output output = Command::Output::files,
                                  const std::string& input = "");

/// Expects the command to have ended with this code, and its messages to have this part.
inline void expect_failure(const Outcome& outcome, int exit_code, const std::string& part) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
  EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
}

}  // namespace keyhole::tools
