// A file that is written whole or not at all: whenever the machine stops, a reader finds the old content or the new.
#pragma once

#include <filesystem>
#include <iosfwd>
#include <memory>

namespace keyhole {

/// The new content of a file, under a name of its own in the same folder until commit() gives it the file's. That name
/// cannot be guessed, and nothing that is there already is opened, followed or removed: several processes may replace one
/// file at once, and the last one to commit wins.
class NewFile {
 public:
  enum class Access {
    owner,     ///< mode 0600: what it holds is its owner's text in effect, as a saved context is
    as_umask,  ///< mode 0666 less the process's umask
  };

  /// Creates it. Throws std::system_error "cannot write PATH: WHY".
  explicit NewFile(std::filesystem::path path, Access access = Access::as_umask);
  /// Removes it unless it was committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// Takes bytes in their order. What cannot be written throws std::system_error from the operation that finds it; the
  /// state of the stream need not be looked at.
  [[nodiscard]] std::ostream& stream();
  /// Brings the content to the disk, renames it to its path, and brings the name to the disk. Once. Throws
  /// std::system_error; up to the rename the old file is as it was.
  void commit();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace keyhole
