// A file that is written whole or not at all: whenever the machine stops, a reader finds the old content or the new.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <memory>

namespace keyhole {

/// The new content of a file. Until commit() gives it the file's name, it has a name of its own in the same folder,
/// which cannot be guessed; nothing that exists is opened, followed or removed for it. Several processes may replace
/// one file at once, and the last one to commit wins. A link is followed: the file that it leads to is replaced, and
/// the link stays.
///
/// Where the path names no regular file (a device, a FIFO, /dev/stdout), bytes are written to it as they come, and
/// opening may wait for a reader. Two other files are written over in place: one in a folder that takes no new names,
/// and, once the content is whole, one whose name cannot be given to another file (mounted by itself). WriteTarget
/// says what is refused.
class NewFile {
 public:
  enum class Access {
    owner,     ///< mode 0600: what it holds is its owner's text in effect, as a saved context is
    as_umask,  ///< mode 0666 less the process's umask
  };

  /// Creates the new file. Throws std::system_error "cannot write PATH: WHY". For a target that is written in place
  /// it only asks whether writing is allowed; the first byte opens it.
  explicit NewFile(const std::filesystem::path& path, Access access = Access::as_umask);
  /// Removes the new file unless it was committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// The stream that takes the bytes in order. An operation that cannot write throws std::system_error; the state of
  /// the stream need not be looked at.
  [[nodiscard]] std::ostream& stream();
  /// Brings the content to the disk, renames it to its path, and brings the name to the disk. Call it once. Throws
  /// std::system_error; up to the rename the old file is unchanged. If writing over a file whose name could not be
  /// taken fails, the new content stays beside it, and the error says where.
  void commit();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole
