// Repairs of standard input, output and error as a program may find them: closed, or on a disk that is full.
#pragma once

namespace keyhole::tools {

/// Opens those of the descriptors 0 to 2 that are closed as /dev/null, from which nothing comes and which takes
/// nothing (EBADF). Otherwise the next file that is opened would get the number, and be read as typed input or be
/// written over by results. Call it first in main().
void open_missing_streams();

/// Throws std::runtime_error where something that was written to standard output until now has not arrived.
void check_output_arrived();

}  // namespace keyhole::tools
