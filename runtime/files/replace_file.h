// Writing a file whole or not at all, in one call.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>

#include "runtime/files/new_file.h"

namespace keyhole {

/// Replaces the content of `path` by what `write` writes, see NewFile. Throws std::system_error "cannot write PATH:
/// WHY" where the system refuses something, or what `write` throws: then the old file is unchanged, and nothing is
/// left beside it.
void replace_file(const std::filesystem::path& path,
                  const std::function<void(std::ostream& out)>& write,
                  NewFile::Access access = NewFile::Access::as_umask);

}  // namespace keyhole
