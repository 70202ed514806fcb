// The target of writing to a path that somebody names as an output: the file behind links, a device or pipe as it
// stands, or one of the process's own descriptors.
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

/// Finds the target: follows links, and examines what `path` names without opening it, because the reader of a FIFO
/// would see its end. Throws std::system_error "cannot write PATH: WHY" for targets that cannot be written: folders,
/// sockets, what the process may not write, and, in a folder where everybody may create names (sticky, as /tmp),
/// links, pipes and devices of other users, which may have been planted.
[[nodiscard]] WriteTarget write_target(const std::filesystem::path& path);

/// The path, all links followed, of a file that will have others beside it. Throws std::system_error where `path`
/// names anything but a regular file or nothing.
[[nodiscard]] std::filesystem::path replaceable_path(const std::filesystem::path& path);

/// The path to which links lead from `path`, or `path` itself: where a reader looks for files beside it. A link that
/// leads nowhere is returned as it is.
[[nodiscard]] std::filesystem::path path_behind_links(const std::filesystem::path& path);

}  // namespace keyhole
