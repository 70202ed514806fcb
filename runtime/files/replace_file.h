// Files that are written whole or not at all: whenever the machine stops, a reader finds the old
// content or the new.
#pragma once

#include <filesystem>
#include <functional>
#include <iosfwd>

namespace keyhole {

/// Lets `write` write the new content of `path` to PATH.tmp, brings that to the disk (fsync),
/// renames it to `path`, and brings the name to the disk. Throws std::system_error "cannot write
/// PATH.tmp: WHY" where the system refuses something, or what `write` throws. Up to the rename the
/// old file is as it was, and PATH.tmp is removed. Only one thread and process at a time may
/// replace a file.
void replace_file(const std::filesystem::path& path,
                  const std::function<void(std::ostream& out)>& write);

/// The second half by itself, for a file that was written in another way: `from` is on the disk,
/// and becomes `to`. Throws std::system_error.
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace keyhole
