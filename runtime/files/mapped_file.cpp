#include "runtime/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace keyhole {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int error) {
  throw CannotRead(path.string() + ": " + what + ": " + std::strerror(error));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // Not blocking: of a pipe that nobody writes to, the type is known before it is waited for.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) fail(path, "cannot be opened", errno);
  struct stat info {};
  if (fstat(file.get(), &info) != 0) fail(path, "cannot be examined", errno);
  if (!S_ISREG(info.st_mode)) throw CannotRead(path.string() + ": is not a regular file");
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) return;  // an empty file cannot be mapped, and needs no mapping
  void* data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) fail(path, "cannot be mapped", errno);
  bytes_ = {static_cast<const std::byte*>(data), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace keyhole
