// A file that is written whole or not at all: whenever the machine stops, a reader finds the old content or the new.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <memory>

namespace keyhole {

/// The new content of a file, under a name of its own in the same folder until commit() gives it the file's. That name
/// cannot be guessed, and nothing that is there already is opened, followed or removed for it: several processes may replace one
/// file at once, and the last one to commit wins. Links are followed: what they lead to is replaced, and they stay.
///
/// What is no regular file (a device, a FIFO, /dev/stdout) is written where it is, as bytes come; its opening may wait for
/// a reader. So is a file in a folder that takes no new names, and, once the content is whole, one whose name cannot be given to
/// another file (mounted by itself). See WriteTarget for what is refused.
class NewFile {
 public:
  enum class Access {
    owner,     ///< mode 0600: what it holds is its owner's text in effect, as a saved context is
    as_umask,  ///< mode 0666 less the process's umask
  };

  /// Creates it. Throws std::system_error "cannot write PATH: WHY". Of what is written where it is, it only asks whether it may
  /// be written: the first byte opens it.
  explicit NewFile(const std::filesystem::path& path, Access access = Access::as_umask);
  /// Removes it unless it was committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// Takes bytes in their order. What cannot be written throws std::system_error from the operation that finds it; the
  /// state of the stream need not be looked at.
  [[nodiscard]] std::ostream& stream();
  /// Brings the content to the disk, renames it to its path, and brings the name to the disk. Once. Throws
  /// std::system_error; up to the rename the old file is as it was. Where writing over a file whose name could not be taken fails,
  /// the new content stays beside it, and the error says where.
  void commit();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole
