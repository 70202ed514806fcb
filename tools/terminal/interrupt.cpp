#include "tools/terminal/interrupt.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace keyhole::tools {
namespace {

volatile std::sig_atomic_t noted = 0;
int wake[2] = {-1, -1};  // a pipe, written by the handler

extern "C" void note_interrupt(int) {
  const int error = errno;
  noted = 1;
  // A full pipe is readable as well.
  if (wake[1] >= 0 && write(wake[1], "", 1) < 0) noted = 1;
  errno = error;
}

void install() {
  struct sigaction action {};
  action.sa_handler = note_interrupt;
  sigemptyset(&action.sa_mask);
  // The default handler comes back after the first signal: a second Ctrl-C ends the process at once.
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

}  // namespace

void handle_interrupts() {
  if (wake[0] < 0 && pipe2(wake, O_CLOEXEC | O_NONBLOCK) != 0) wake[0] = wake[1] = -1;
  install();
}

bool interrupted() { return noted != 0; }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

void forget_interrupt() {
  char bytes[64];
  while (wake[0] >= 0 && read(wake[0], bytes, sizeof bytes) > 0) {
  }
  noted = 0;
  install();
}

int interrupt_descriptor() { return wake[0]; }

}  // namespace keyhole::tools
