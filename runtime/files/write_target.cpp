#include "runtime/files/write_target.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <optional>
#include <string>
#include <system_error>

namespace keyhole {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as Linux

[[noreturn]] void refuse_target(const fs::path& path, int error, const std::string& why = "") {
  throw std::system_error(error, std::generic_category(),
                          "cannot write " + path.string() + (why.empty() ? "" : " (" + why + ")"));
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

/// N of /proc/self/fd/N, to which /dev/stdout leads.
std::optional<int> own_descriptor(const fs::path& path) {
  const std::string name = path.filename().string();
  int number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size() || number < 0) return std::nullopt;
  std::error_code none;
  const fs::path mine = fs::canonical("/proc/self/fd", none);
  if (none || fs::canonical(folder_of(path), none) != mine || none) return std::nullopt;
  return number;
}

bool may_write(const fs::path& path) {
  return faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0;
}

/// Whether everybody may create names in the folder of `path` and `status` belongs neither to this user nor to the
/// folder's owner: the rule of Linux's protected_symlinks and protected_fifos, which a system may have switched off.
bool is_of_others(const fs::path& path, const struct stat& status) {
  struct stat folder {};
  if (stat(folder_of(path).c_str(), &folder) != 0) return false;
  constexpr mode_t kShared = S_ISVTX | S_IWOTH;
  return (folder.st_mode & kShared) == kShared && status.st_uid != geteuid() &&
         status.st_uid != folder.st_uid;
}

/// Whether `path` is a file that was mounted by itself, as containers have them, whose name no other file can take.
bool is_mount(const fs::path& path) {
#ifdef STATX_ATTR_MOUNT_ROOT
  struct statx seen {};
  return statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_TYPE, &seen) == 0 &&
         (seen.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
#else
  (void)path;
  return false;
#endif
}

}  // namespace

WriteTarget write_target(const fs::path& named) {
  WriteTarget target;
  target.path = named;
  fs::path& path = target.path;
  if (path.empty()) refuse_target(named, ENOENT);
  for (int link = 0; link < kMostLinks; ++link) {
    if (const std::optional<int> descriptor = own_descriptor(path)) {
      const int flags = fcntl(*descriptor, F_GETFL);
      if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) refuse_target(named, EBADF);
      target.how = WriteTarget::How::descriptor;
      target.descriptor = *descriptor;
      return target;
    }
    struct stat status {};
    if (lstat(path.c_str(), &status) != 0) {
      if (errno != ENOENT) refuse_target(named, errno);
      return target;  // nothing yet
    }
    target.exists = true;
    if (S_ISDIR(status.st_mode)) refuse_target(named, EISDIR);
    if (S_ISREG(status.st_mode)) {
      // Where a new file cannot take the name, the old one is written over, so it must allow writing.
      const bool is_taken = is_mount(path) || (is_of_others(path, status) && geteuid() != 0);
      if (is_taken && !may_write(path)) refuse_target(named, errno);
      return target;
    }
    if (is_of_others(path, status)) {
      refuse_target(named, EACCES, "of another user, in a folder where everybody may write");
    }
    if (!S_ISLNK(status.st_mode)) {
      if (S_ISSOCK(status.st_mode)) refuse_target(named, ENXIO);
      if (!may_write(path)) refuse_target(named, errno);
      target.how = WriteTarget::How::in_place;
      return target;
    }
    std::error_code error;
    const fs::path to = fs::read_symlink(path, error);
    if (error) refuse_target(named, error.value());
    path = folder_of(path) / to;
    target.exists = false;
  }
  refuse_target(named, ELOOP);
}

fs::path replaceable_path(const fs::path& path) {
  const WriteTarget target = write_target(path);
  if (target.how != WriteTarget::How::replace) {
    refuse_target(path, EINVAL, "it is no regular file, and files are to lie beside it");
  }
  return target.path;
}

fs::path path_behind_links(const fs::path& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  const fs::path real = fs::canonical(path, error);
  return error ? path : real;
}

}  // namespace keyhole
