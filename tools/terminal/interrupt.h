// Lets Ctrl-C, and the signals that ask a process to end (SIGTERM, SIGHUP), end long work cleanly: loops and progress
// callbacks ask for an interrupt, destructors remove partial files.
#pragma once

namespace keyhole::tools {

/// Thrown by throw_if_interrupted(); no std::exception, so that no handler of errors swallows it.
struct Interrupted {};

/// Installs the handler. The first signal of a kind is noted; a second one ends the process at once. SIGHUP and
/// SIGTERM stay ignored where they are (nohup).
void handle_interrupts();

[[nodiscard]] bool interrupted();
/// 128 plus the number of the noted signal, as shells report it: 130 for Ctrl-C.
[[nodiscard]] int interrupted_exit_code();
void throw_if_interrupted();

/// Forgets an answered Ctrl-C, so that the next one is noted as the first was. For programs that go on after one. A
/// process that was asked to end stays interrupted.
void forget_interrupt();

/// A descriptor that is readable from an interrupt on until it is forgotten. Code that waits for input polls it as
/// well, because the signal may reach another thread. -1 before handle_interrupts().
[[nodiscard]] int interrupt_descriptor();

}  // namespace keyhole::tools
