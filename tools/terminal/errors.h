// How a command fails, and how its exit code says so.
#pragma once

#include <stdexcept>

namespace keyhole::tools {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,        ///< the work failed: a file, the memory, the library
  kExitUsage = 2,          ///< the command line is wrong
  kExitInterrupted = 130,  ///< SIGINT, as shells report it; of other signals 128 and their number
};

/// Thrown where the command line asks for something impossible: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace keyhole::tools
