// A regular file opened for reading: the one place of the library that opens files made by others.
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

/// A file opened for reading. Several threads may read it at once.
class InputFile {
 public:
  /// Opens the file. Throws CannotRead that names the file and the system's reason. If the path names no regular
  /// file, it does not wait for it.
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// The size in bytes when the file was opened.
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] int descriptor() const { return fd_; }
  /// Copies the bytes from `offset` on. Throws CannotRead, also where the file has become shorter than that. The
  /// caller checks bytes in its own memory, where no other process can change them or end this one by cutting the
  /// file.
  void read(size_t offset, std::span<std::byte> to) const;

 private:
  std::filesystem::path path_;
  int fd_;
  size_t size_ = 0;
};

}  // namespace keyhole
