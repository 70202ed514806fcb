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

/// The interrupt has been answered: the next one is noted as the first was. For programs that go on after one.
void forget_interrupt();

/// A descriptor that is readable from an interrupt on until it is forgotten: what waits for input polls it too, as the
/// signal may reach another thread. -1 before handle_interrupts().
[[nodiscard]] int interrupt_descriptor();

}  // namespace keyhole::tools
