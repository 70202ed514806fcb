// A whole file as read-only memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>

namespace keyhole {

/// A file that cannot be opened or mapped, independent of its content.
class CannotRead : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Maps a regular file. Throws CannotRead that names the file and the system's reason. The
/// file must not shrink while it is mapped.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace keyhole
