// Ctrl-C ends long work cleanly: loops and progress callbacks ask, destructors remove partial
// files.
#pragma once

namespace keyhole::tools {

/// Thrown by throw_if_interrupted(); no std::exception, so that no handler of errors swallows it.
struct Interrupted {};

/// Installs the handler. The first SIGINT is noted; a second one ends the process at once.
void handle_interrupts();

[[nodiscard]] bool interrupted();
void throw_if_interrupted();

}  // namespace keyhole::tools
