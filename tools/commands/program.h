// The keyhole command, without its main().
#pragma once

namespace keyhole::tools {

/// Parses the command line, runs one subcommand, and returns the exit code that its outcome stands for.
int run_program(int argc, char** argv);

}  // namespace keyhole::tools
