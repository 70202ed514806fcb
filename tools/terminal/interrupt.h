// Ctrl-C, and what asks a process to end (SIGTERM, SIGHUP), end long work cleanly: loops and progress callbacks ask, destructors remove partial
// files.
#pragma once

namespace keyhole::tools {

/// Thrown by throw_if_interrupted(); no std::exception, so that no handler of errors swallows it.
struct Interrupted {};

/// Installs the handler. The first signal of a kind is noted; a second one ends the process at once. SIGHUP and SIGTERM that are
/// ignored stay so (nohup).
void handle_interrupts();

[[nodiscard]] bool interrupted();
/// 128 and the number of the signal that was noted, as shells report it: 130 for Ctrl-C.
[[nodiscard]] int interrupted_exit_code();
void throw_if_interrupted();

/// Ctrl-C has been answered: the next one is noted as the first was. For programs that go on after one. Who was asked to end
/// stays interrupted.
void forget_interrupt();

/// A descriptor that is readable from an interrupt on until it is forgotten: what waits for input polls it too, as the
/// signal may reach another thread. -1 before handle_interrupts().
[[nodiscard]] int interrupt_descriptor();

}  // namespace keyhole::tools
