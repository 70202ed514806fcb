#include "runtime/files/replace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

namespace keyhole {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what) {
  // A stream that has failed without a system call leaves errno at 0.
  throw std::system_error(errno != 0 ? errno : EIO, std::generic_category(), what);
}

/// A descriptor that is closed in the end.
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  [[nodiscard]] bool sync() const { return ::fsync(fd_) == 0; }

 private:
  int fd_;
};

void write_file(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  const std::string failed = "cannot write " + path.string();
  errno = 0;
  // Open all the time, so that no error of the disk gets lost between the stream's end and fsync.
  const Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC);
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!file.is_open() || !out) fail(failed);
  write(out);
  out.close();
  if (!out || !file.sync()) fail(failed);
}

}  // namespace

void rename_file(const fs::path& from, const fs::path& to) {
  fs::rename(from, to);
  const fs::path folder = to.has_parent_path() ? to.parent_path() : fs::path(".");
  const Descriptor names(folder, O_RDONLY | O_DIRECTORY);
  // A folder that may be searched but not read, or a file system that cannot sync folders: the file
  // is there under its name, and the name reaches the disk when the system writes it.
  if (!names.is_open() || names.sync() || errno == EINVAL) return;
  fail("cannot write the folder " + folder.string());
}

void replace_file(const fs::path& path, const std::function<void(std::ostream&)>& write) {
  fs::path temporary = path;
  temporary += ".tmp";
  try {
    write_file(temporary, write);
    rename_file(temporary, path);
  } catch (...) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw;
  }
}

}  // namespace keyhole
