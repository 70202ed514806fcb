#include "runtime/files/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace keyhole {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const InputFile file(path);
  if (file.size() == 0) return;  // an empty file cannot be mapped, and needs no mapping
  void* data = mmap(nullptr, file.size(), PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (data == MAP_FAILED) {
    throw CannotRead(path.string() + ": cannot be mapped: " + std::strerror(errno));
  }
  bytes_ = {static_cast<const std::byte*>(data), file.size()};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace keyhole
