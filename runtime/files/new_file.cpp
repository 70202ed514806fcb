#include "runtime/files/new_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <optional>
#include <ostream>
#include <random>
#include <streambuf>
#include <string>
#include <system_error>
#include <vector>

#include "runtime/files/write_target.h"

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

/// Blocks SIGPIPE in the thread while it lives: writing to a pipe without a reader is then an error of write()
/// (EPIPE) and does not end the process. A SIGPIPE sent meanwhile is consumed.
class NoPipeSignal {
 public:
  NoPipeSignal() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoPipeSignal() {
    const int error = errno;
    const timespec now{};
    while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &now) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

 private:
  sigset_t pipe_{}, before_{};
  bool was_pending_ = false;
};

/// Writes all `n` bytes. Throws the system's error for `path`.
void write_all(int fd, const char* data, size_t n, const fs::path& path) {
  const NoPipeSignal guard;
  while (n != 0) {
    const ssize_t written = ::write(fd, data, n);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_to_write(path);
    data += written;
    n -= static_cast<size_t>(written);
  }
}

/// Where the bytes of a new content are written until they are whole, or for good.
class Output {
 public:
  virtual ~Output() = default;
  /// A descriptor that is open for writing, opened now or before.
  [[nodiscard]] virtual int descriptor() = 0;
  /// Makes what was written the content of the target, on the disk.
  virtual void become() = 0;
};

/// Writes to an output; throws what the system says.
class OutputBuffer final : public std::streambuf {
 public:
  OutputBuffer(Output& output, const fs::path& path)
      : output_(&output), path_(&path), room_(kRoom) {
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
    if (n != 0) write_all(output_->descriptor(), data, n, *path_);
  }

  Output* output_;
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

/// Brings a descriptor to the disk, where it leads to one: pipes and terminals have none.
void sync_to_disk(int fd, const fs::path& path) {
  if (::fsync(fd) == 0 || errno == EINVAL || errno == EROFS || errno == ENOTSUP) return;
  fail_to_write(path);
}

/// Output that is written in place: to a device, a pipe, or a regular file in a folder that takes no new names. Its
/// first byte opens and empties it, so that asking whether it can be written changes nothing.
class InPlace final : public Output {
 public:
  InPlace(const WriteTarget& target, NewFile::Access access) : target_(target), access_(access) {}

  int descriptor() override {
    if (file_) return file_->get();
    if (target_.how == WriteTarget::How::descriptor) {
      file_.emplace(::fcntl(target_.descriptor, F_DUPFD_CLOEXEC, 0));
    } else {
      file_.emplace(::open(target_.path.c_str(), O_WRONLY | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC));
    }
    if (file_->get() < 0) fail_to_write(target_.path);
    if (is_file()) {
      if (access_ == NewFile::Access::owner && ::fchmod(file_->get(), 0600) != 0) {
        fail_to_write(target_.path);
      }
      if (::ftruncate(file_->get(), 0) != 0) fail_to_write(target_.path);
    }
    return file_->get();
  }
  void become() override { sync_to_disk(descriptor(), target_.path); }

 private:
  [[nodiscard]] bool is_file() const { return target_.how == WriteTarget::How::replace; }

  WriteTarget target_;
  NewFile::Access access_;
  std::optional<Descriptor> file_;
};

/// A new file beside its target. It is removed in the end unless it has become the target.
class Temporary final : public Output {
 public:
  Temporary(const WriteTarget& target, NewFile::Access access)
      : target_(target),
        access_(access),
        name_(with_random_end(target.path)),
        file_(::open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                     access == NewFile::Access::owner ? 0600 : 0666)),
        error_(errno) {}
  ~Temporary() override {
    if (is_open() && !has_moved_) ::unlink(name_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  [[nodiscard]] bool is_open() const { return file_.get() >= 0; }
  [[nodiscard]] int error() const { return error_; }
  int descriptor() override { return file_.get(); }

  void become() override {
    if (::fsync(file_.get()) != 0) fail_to_write(target_.path);
    if (::rename(name_.c_str(), target_.path.c_str()) == 0) {
      has_moved_ = true;
      sync_folder();
      return;
    }
    // EBUSY means a file that was mounted by itself; the other errors mean a file of another user in a shared folder,
    // or one that may be changed but not removed.
    if (!target_.exists || (errno != EBUSY && errno != EPERM && errno != EACCES)) {
      fail_to_write(target_.path);
    }
    write_over();
  }

 private:
  void sync_folder() const {
    const fs::path& path = target_.path;
    const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
    const Descriptor names(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // A folder that may be searched but not read, or a file system that cannot sync folders: the file is there under
    // its name, and the name reaches the disk when the system writes it.
    if (names.get() < 0 || ::fsync(names.get()) == 0 || errno == EINVAL) return;
    fail_to_write(folder);
  }

  void write_over() {
    InPlace old(target_, access_);
    (void)old.descriptor();
    try {
      std::vector<char> piece(size_t{1} << 18U);
      for (off_t at = 0;;) {
        const ssize_t n = ::pread(file_.get(), piece.data(), piece.size(), at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail_to_write(target_.path);
        if (n == 0) break;
        write_all(old.descriptor(), piece.data(), static_cast<size_t>(n), target_.path);
        at += n;
      }
      old.become();
    } catch (const std::system_error& e) {
      has_moved_ = true;  // the only whole copy stays
      throw std::system_error(e.code(), "cannot write " + target_.path.string() +
                                            ", all that was to be written is in " + name_.string());
    }
  }

  WriteTarget target_;
  NewFile::Access access_;
  fs::path name_;
  Descriptor file_;
  int error_;
  bool has_moved_ = false;
};

std::unique_ptr<Output> output_of(const WriteTarget& target, NewFile::Access access) {
  if (target.how != WriteTarget::How::replace) return std::make_unique<InPlace>(target, access);
  auto temporary = std::make_unique<Temporary>(target, access);
  if (temporary->is_open()) return temporary;
  // The folder takes no new names, but has this one.
  const int error = temporary->error();
  if (target.exists && (error == EACCES || error == EROFS || error == EPERM) &&
      ::faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) == 0) {
    return std::make_unique<InPlace>(target, access);
  }
  errno = error;
  fail_to_write(target.path);
}

}  // namespace

class NewFile::Impl {
 public:
  Impl(const fs::path& path, Access access)
      : path_(path),
        output_(output_of(write_target(path), access)),
        buffer_(*output_, path_),
        stream_(&buffer_) {
    stream_.exceptions(std::ios::badbit);  // lets what the buffer throws through
  }

  std::ostream& stream() { return stream_; }

  void commit() {
    stream_.flush();
    output_->become();
  }

 private:
  fs::path path_;
  std::unique_ptr<Output> output_;
  OutputBuffer buffer_;
  std::ostream stream_;
};

NewFile::NewFile(const fs::path& path, Access access)
    : impl_(std::make_unique<Impl>(path, access)) {}
NewFile::~NewFile() = default;

std::ostream& NewFile::stream() { return impl_->stream(); }

void NewFile::commit() { impl_->commit(); }

}  // namespace keyhole
