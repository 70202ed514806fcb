#include "runtime/files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace keyhole {
namespace {

// The most bytes that the system copies in one call.
constexpr size_t kMostOfACall = size_t{1} << 30U;

}  // namespace

// Opens without blocking, so that the type of a pipe that nobody writes to is known before it is waited for.
InputFile::InputFile(const std::filesystem::path& path)
    : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  const auto fail = [&](const std::string& why) {
    if (fd_ >= 0) close(fd_);
    throw CannotRead(path_.string() + ": " + why);
  };
  if (fd_ < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat info {};
  if (fstat(fd_, &info) != 0) fail(std::string("cannot be examined: ") + std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail("is not a regular file");
  size_ = static_cast<size_t>(info.st_size);
}

InputFile::~InputFile() { close(fd_); }

void InputFile::read(size_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t n =
        pread(fd_, to.data(), std::min(to.size(), kMostOfACall), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw CannotRead(path_.string() + ": cannot be read: " + std::strerror(errno));
    if (n == 0) {
      throw CannotRead(path_.string() + ": ends at byte " + std::to_string(offset) + ", it had " +
                       std::to_string(size_) + " when it was opened: it was cut meanwhile");
    }
    offset += static_cast<size_t>(n);
    to = to.subspan(static_cast<size_t>(n));
  }
}

}  // namespace keyhole
