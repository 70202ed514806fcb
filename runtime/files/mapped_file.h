// A whole file as read-only memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include "runtime/files/input_file.h"

namespace keyhole {

/// Maps a regular file. Throws CannotRead that names the file and the system's reason. The file must not shrink while
/// it is mapped: the system ends a process (SIGBUS) that reads behind its end. So the library reads files instead of
/// mapping them (InputFile); its tools map large ones.
/// (InputFile); its tools map what is large.
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
