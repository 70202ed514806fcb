#include "tools/terminal/interrupt.h"

#include <csignal>

namespace keyhole::tools {
namespace {

volatile std::sig_atomic_t noted = 0;

extern "C" void note_interrupt(int) { noted = 1; }

}  // namespace

void handle_interrupts() {
  struct sigaction action {};
  action.sa_handler = note_interrupt;
  sigemptyset(&action.sa_mask);
  // The default handler comes back after the first signal: a second Ctrl-C ends the process at once.
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return noted != 0; }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

}  // namespace keyhole::tools
