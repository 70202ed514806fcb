#include "runtime/files/replace_file.h"

namespace keyhole {

void replace_file(const std::filesystem::path& path,
                  const std::function<void(std::ostream&)>& write, NewFile::Access access) {
  NewFile file(path, access);
  write(file.stream());
  file.commit();
}

}  // namespace keyhole
