#include "runtime/files/new_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ostream>
#include <random>
#include <streambuf>
#include <string>
#include <system_error>
#include <vector>

namespace keyhole {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_to_write(const fs::path& path) {
  throw std::system_error(errno, std::generic_category(), "cannot write " + path.string());
}

/// A descriptor that is closed in the end.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

/// Writes to a descriptor; throws what the system says.
class DescriptorBuffer final : public std::streambuf {
 public:
  DescriptorBuffer(int fd, const fs::path& path) : fd_(fd), path_(&path), room_(kRoom) {
    setp(room_.data(), room_.data() + room_.size());
  }

 protected:
  int_type overflow(int_type c) override {
    flush();
    if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
    *pptr() = traits_type::to_char_type(c);
    pbump(1);
    return c;
  }
  std::streamsize xsputn(const char* data, std::streamsize n) override {
    if (n > epptr() - pptr()) flush();
    if (n >= static_cast<std::streamsize>(kRoom)) {
      write(data, static_cast<size_t>(n));
      return n;
    }
    std::copy_n(data, n, pptr());
    pbump(static_cast<int>(n));
    return n;
  }
  int sync() override {
    flush();
    return 0;
  }

 private:
  static constexpr size_t kRoom = size_t{1} << 18U;

  void flush() {
    const auto n = static_cast<size_t>(pptr() - pbase());
    setp(room_.data(), room_.data() + room_.size());
    write(room_.data(), n);
  }
  void write(const char* data, size_t n) {
    while (n != 0) {
      const ssize_t written = ::write(fd_, data, n);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_to_write(*path_);
      data += written;
      n -= static_cast<size_t>(written);
    }
  }

  int fd_;
  const fs::path* path_;
  std::vector<char> room_;
};

/// `path` with an end that nobody else has, 48 random bits.
fs::path with_random_end(const fs::path& path) {
  static constexpr char kDigits[] = "abcdefghijklmnopqrstuvwxyz012345";
  std::random_device random;
  std::string end = ".";
  for (int i = 0; i < 10; ++i) end += kDigits[random() % 32];
  fs::path with = path;
  with += end;
  return with;
}

/// A new file beside `path`, which goes in the end unless it has become that.
class Temporary {
 public:
  Temporary(const fs::path& path, mode_t mode)
      : name_(with_random_end(path)),
        file_(::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode)) {
    if (file_.get() < 0) fail_to_write(path);
  }
  ~Temporary() {
    if (!has_moved_) ::unlink(name_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  [[nodiscard]] int descriptor() const { return file_.get(); }
  void become(const fs::path& path) {
    if (::fsync(file_.get()) != 0) fail_to_write(path);
    if (::rename(name_.c_str(), path.c_str()) != 0) fail_to_write(path);
    has_moved_ = true;
  }

 private:
  fs::path name_;
  Descriptor file_;
  bool has_moved_ = false;
};

}  // namespace

class NewFile::Impl {
 public:
  Impl(fs::path path, Access access)
      : path_(std::move(path)),
        temporary_(path_, access == Access::owner ? 0600 : 0666),
        buffer_(temporary_.descriptor(), path_),
        stream_(&buffer_) {
    stream_.exceptions(std::ios::badbit);  // lets what the buffer throws through
  }

  std::ostream& stream() { return stream_; }

  void commit() {
    stream_.flush();
    temporary_.become(path_);
    const fs::path folder = path_.has_parent_path() ? path_.parent_path() : fs::path(".");
    const Descriptor names(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // A folder that may be searched but not read, or a file system that cannot sync folders: the file is there under
    // its name, and the name reaches the disk when the system writes it.
    if (names.get() < 0 || ::fsync(names.get()) == 0 || errno == EINVAL) return;
    fail_to_write(folder);
  }

 private:
  fs::path path_;
  Temporary temporary_;
  DescriptorBuffer buffer_;
  std::ostream stream_;
};

NewFile::NewFile(fs::path path, Access access)
    : impl_(std::make_unique<Impl>(std::move(path), access)) {}
NewFile::~NewFile() = default;

std::ostream& NewFile::stream() { return impl_->stream(); }

void NewFile::commit() { impl_->commit(); }

}  // namespace keyhole
