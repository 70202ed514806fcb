#include "tools/terminal/line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "tools/terminal/interrupt.h"

namespace keyhole::tools {

LineReader::Event LineReader::read(std::string& line) {
  while (true) {
    if (interrupted()) {
      pending_.clear();
      return Event::interrupted;
    }
    const size_t end = pending_.find('\n');
    if (end != std::string::npos || (ended_ && !pending_.empty())) {
      line = pending_.substr(0, end);
      pending_.erase(0, end == std::string::npos ? end : end + 1);
      if (line.ends_with('\r')) line.pop_back();
      return Event::line;
    }
    if (ended_) return Event::end;

    pollfd wanted[] = {{descriptor_, POLLIN, 0}, {interrupt_descriptor(), POLLIN, 0}};
    if (poll(wanted, 2, -1) < 0 && errno != EINTR) {
      throw std::runtime_error(std::string("standard input: ") + std::strerror(errno));
    }
    if (interrupted() || wanted[0].revents == 0) continue;
    char bytes[4096];
    const ssize_t count = ::read(descriptor_, bytes, sizeof bytes);
    if (count < 0 && errno != EINTR && errno != EAGAIN) {
      // A terminal whose other side has gone.
      if (errno != EIO) {
        throw std::runtime_error(std::string("standard input: ") + std::strerror(errno));
      }
      ended_ = true;
    }
    if (count == 0) ended_ = true;
    if (count > 0) pending_.append(bytes, static_cast<size_t>(count));
  }
}

}  // namespace keyhole::tools
