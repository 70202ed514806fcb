#include "tools/terminal/standard_streams.h"

#include <fcntl.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace keyhole::tools {

void open_missing_streams() {
  for (int descriptor = 0; descriptor < 3; ++descriptor) {
    // The lowest free number is the closed one. It is opened for reading only, so that a write fails.
    if (fcntl(descriptor, F_GETFD) < 0 && errno == EBADF) (void)open("/dev/null", O_RDONLY);
  }
}

void check_output_arrived() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  // An earlier failure was reported to whoever wrote, and its errno is gone.
  const std::string why = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
  throw std::runtime_error("standard output: not all could be written" + why);
}

}  // namespace keyhole::tools
