// Standard input, output and error as a program may find them: closed, or on a disk that is full.
#pragma once

namespace keyhole::tools {

/// Gives the descriptors 0 to 2 that are closed to /dev/null, from which nothing comes and which takes nothing (EBADF): else the next
/// file that is opened has the number, is read as what somebody types, or is written over by results. First thing in main().
void open_missing_streams();

/// Throws std::runtime_error where something of what was written to standard output until now has not arrived.
void check_output_arrived();

}  // namespace keyhole::tools
