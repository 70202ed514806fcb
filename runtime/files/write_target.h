// What is written where somebody names a path as an output: the file behind links, a device or pipe as it stands, one
// of the process's own descriptors.
#pragma once

#include <filesystem>

namespace keyhole {

struct WriteTarget {
  enum class How {
    replace,   ///< a regular file, or nothing yet: a new file takes its name
    in_place,  ///< a device or a FIFO: is opened and written, and stays what it is
    descriptor,  ///< /dev/stdout, /dev/fd/N, /proc/self/fd/N: goes on where the process's descriptor stands
  };
  How how = How::replace;
  std::filesystem::path path;  ///< all links followed
  int descriptor = -1;
  bool exists = false;
};

/// Follows links, and asks what `path` names without opening it: the reader of a FIFO would see its end. Throws std::system_error
/// "cannot write PATH: WHY" for what cannot be written: folders, sockets, what the process may not write, and in a folder where
/// everybody may create names (sticky, as /tmp), links, pipes and devices of other users, which may have been planted.
[[nodiscard]] WriteTarget write_target(const std::filesystem::path& path);

/// The same for a file that has others beside it. Throws std::system_error where `path` names anything but a regular file or
/// nothing; returns the path with all links followed.
[[nodiscard]] std::filesystem::path replaceable_path(const std::filesystem::path& path);

/// `path` itself, or what it leads to where it is a link: where a reader looks for the files beside it. A link that leads
/// nowhere stays as it is.
[[nodiscard]] std::filesystem::path path_behind_links(const std::filesystem::path& path);

}  // namespace keyhole
