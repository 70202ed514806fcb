#include "tests/tools/cli/run_command.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <thread>

namespace keyhole::tools {
namespace {

// Variables of this process that change what the command prints stay behind.
std::vector<std::string> environment_with(const std::map<std::string, std::string>& added) {
  std::vector<std::string> out;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const std::string name(text.substr(0, text.find('=')));
    const bool decides = name == "NO_COLOR" || name == "TERM" || name == "LANG" ||
                         name == "LC_ALL" || name == "LC_CTYPE";
    if (!decides && added.count(name) == 0) out.emplace_back(text);
  }
  for (const auto& [name, value] : added) out.push_back(name + "=" + value);
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& string : strings) out.push_back(string.data());
  out.push_back(nullptr);
  return out;
}

int open_terminal() {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
    throw std::runtime_error(std::string("no pseudo-terminal: ") + std::strerror(errno));
  }
  return master;
}

// Until the process closes its side, which a pseudo-terminal reports as EIO.
std::string read_to_end(int descriptor) {
  std::string out;
  char buffer[4096];
  for (ssize_t count = 0; (count = read(descriptor, buffer, sizeof buffer)) > 0;) {
    out.append(buffer, static_cast<size_t>(count));
  }
  return out;
}

bool handles_interrupt(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("SigCgt:", 0) != 0) continue;
    return (std::stoull(line.substr(7), nullptr, 16) >> (SIGINT - 1) & 1U) != 0;
  }
  return false;
}

}  // namespace

Command::Command(const std::vector<std::string>& args,
                 const std::map<std::string, std::string>& environment, Output output) {
  std::vector<std::string> words = {KEYHOLE_COMMAND};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> variables = environment_with(environment);

  std::string out = folder_ / "out";
  std::string err = folder_ / "err";
  if (output == Output::terminal) {
    terminal_ = open_terminal();
    out = err = ptsname(terminal_);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_NOCTTY;
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), kFlags, 0600);
  const int error = posix_spawn(&pid_, KEYHOLE_COMMAND, &actions, nullptr, pointers(words).data(),
                                pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw std::runtime_error(std::string(KEYHOLE_COMMAND) +
                             " cannot be run: " + std::strerror(error));
  }
}

Command::~Command() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (terminal_ >= 0) close(terminal_);
}

void Command::interrupt() const {
  while (!handles_interrupt(pid_)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(pid_, SIGINT);
}

Outcome Command::wait() {
  Outcome outcome;
  if (terminal_ >= 0) outcome.out = read_to_end(terminal_);
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (terminal_ < 0) {
    outcome.out = read_file(folder_ / "out");
    outcome.err = read_file(folder_ / "err");
  }
  return outcome;
}

Outcome run_keyhole(const std::vector<std::string>& args,
                    const std::map<std::string, std::string>& environment, Command::Output output) {
  return Command(args, environment, output).wait();
}

}  // namespace keyhole::tools
