// A regular file that is opened for reading: the one place of the library that opens files that somebody else has made.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>

namespace keyhole {

/// A file that cannot be opened, mapped or read, independent of its content.
class CannotRead : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Reading from several threads is allowed.
class InputFile {
 public:
  /// Throws CannotRead that names the file and the system's reason; of what is no regular file it waits for nothing.
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Bytes that it had when it was opened.
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] int descriptor() const { return fd_; }
  /// Copies the bytes from `offset` on. Throws CannotRead, also where the file has become shorter than that: what is read
  /// is checked once it is here, and no other process can change it then, or end this one by cutting the file.
  void read(size_t offset, std::span<std::byte> to) const;

 private:
  std::filesystem::path path_;
  int fd_;
  size_t size_ = 0;
};

}  // namespace keyhole
