// Runs the keyhole command that was built, in a process of its own.
#pragma once

#include <sys/types.h>

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
  enum class Output { files, terminal };
  /// Starts `keyhole ARGS` with the given variables added to an environment that decides nothing by
  /// itself. `terminal`: both outputs go to one pseudo-terminal, and come back as `out`.
  explicit Command(const std::vector<std::string>& args,
                   const std::map<std::string, std::string>& environment = {},
                   Output output = Output::files);
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  /// Waits until the process has its handler for SIGINT, then sends the signal.
  void interrupt() const;
  [[nodiscard]] Outcome wait();

 private:
  TemporaryFolder folder_;
  pid_t pid_ = -1;
  int terminal_ = -1;
};

[[nodiscard]] Outcome run_keyhole(const std::vector<std::string>& args,
                                  const std::map<std::string, std::string>& environment = {},
                                  Command::Output output = Command::Output::files);

}  // namespace keyhole::tools
