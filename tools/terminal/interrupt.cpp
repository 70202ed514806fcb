#include "tools/terminal/interrupt.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

volatile std::sig_atomic_t noted = 0;
int wake[2] = {-1, -1};  // a pipe, written by the handler

extern "C" void note_interrupt(int number) {
  const int error = errno;
  // A process that was asked to end must not go on because of a Ctrl-C.
  if (noted == 0 || noted == SIGINT) noted = number;
  // A full pipe is readable as well.
  if (wake[1] >= 0 && write(wake[1], "", 1) < 0) {
  }
  errno = error;
}

void install(int number) {
  struct sigaction action {};
  action.sa_handler = note_interrupt;
  sigemptyset(&action.sa_mask);
  // The default handler comes back after the first signal: a second Ctrl-C ends the process at once.
  action.sa_flags = SA_RESETHAND;
  sigaction(number, &action, nullptr);
}

}  // namespace

void handle_interrupts() {
  if (wake[0] < 0 && pipe2(wake, O_CLOEXEC | O_NONBLOCK) != 0) wake[0] = wake[1] = -1;
  for (const int number : {SIGTERM, SIGHUP}) {
    struct sigaction before {};
    if (sigaction(number, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) install(number);
  }
  // The last one: where it is seen to be handled, all are (libraries under MPI handle SIGHUP before main()).
  install(SIGINT);
}

int interrupted_exit_code() { return kExitInterrupted + (noted == 0 ? 0 : noted - SIGINT); }

bool interrupted() { return noted != 0; }

void throw_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

void forget_interrupt() {
  if (noted != 0 && noted != SIGINT) return;
  char bytes[64];
  while (wake[0] >= 0 && read(wake[0], bytes, sizeof bytes) > 0) {
  }
  noted = 0;
  install(SIGINT);
}

int interrupt_descriptor() { return wake[0]; }

}  // namespace keyhole::tools
