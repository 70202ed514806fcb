#include "tests/tools/cli/run_command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

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

// The command of the same build, or another: programs may have been moved to the machine that has a GPU.
std::string command_to_run() {
  const char* const named = std::getenv("KEYHOLE_COMMAND");
  return named != nullptr && *named != '\0' ? named : KEYHOLE_COMMAND;
}

bool handles(pid_t pid, int signal) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("SigCgt:", 0) != 0) continue;
    return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1U) != 0;
  }
  return false;
}

}  // namespace

Command::Command(const std::vector<std::string>& args,
                 const std::map<std::string, std::string>& environment, Output output,
                 const std::string& input) {
  std::vector<std::string> words = {command_to_run()};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> variables = environment_with(environment);

  std::string out = folder_ / "out";
  std::string err = folder_ / "err";
  std::string in = folder_ / "in";
  write_file(in, input);
  if (output != Output::files) {
    terminal_ = open_terminal();
    out = err = ptsname(terminal_);
  }
  // The leader of a session owns the first terminal that it opens: Ctrl-C there is its signal.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  int in_flags = O_RDONLY;
  if (output == Output::dialogue) {
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
    in = out;
    in_flags = O_RDWR;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, in.c_str(), in_flags, 0);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_NOCTTY;
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), kFlags, 0600);
  const int error = posix_spawn(&pid_, words[0].c_str(), &actions, &attributes,
                                pointers(words).data(), pointers(variables).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw std::runtime_error(words[0] + " cannot be run: " + std::strerror(error));
  }
}

Command::~Command() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (terminal_ >= 0) close(terminal_);
}

void Command::interrupt(int signal) const {
  // SIGHUP's handler may be that of a library (UCX, under MPI), which was there before the command's own.
  while (!handles(pid_, SIGINT) || !handles(pid_, signal))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  kill(pid_, signal);
}

void Command::type(const std::string& keys) const {
  if (write(terminal_, keys.data(), keys.size()) != static_cast<ssize_t>(keys.size())) {
    throw std::runtime_error(std::string("the terminal takes no keys: ") + std::strerror(errno));
  }
}

std::string Command::expect(const std::string& text) {
  constexpr int kPatienceMs = 120000;
  size_t at = 0;
  while ((at = shown_.find(text, expected_)) == std::string::npos) {
    pollfd terminal{terminal_, POLLIN, 0};
    char buffer[4096];
    ssize_t count = 0;
    if (poll(&terminal, 1, kPatienceMs) > 0) count = read(terminal_, buffer, sizeof buffer);
    if (count <= 0) throw std::runtime_error("no \"" + text + "\" in: " + shown_);
    shown_.append(buffer, static_cast<size_t>(count));
  }
  const size_t begin = std::exchange(expected_, at + text.size());
  return shown_.substr(begin, expected_ - begin);
}

Outcome Command::wait() {
  Outcome outcome;
  if (terminal_ >= 0) outcome.out = shown_ + read_to_end(terminal_);
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
                    const std::map<std::string, std::string>& environment, Command::Output output,
                    const std::string& input) {
  return Command(args, environment, output, input).wait();
}

}  // namespace keyhole::tools
