// Outputs that are no plain files: what stays what it was, and what is refused before anything is done.
#include "runtime/files/write_target.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ostream>
#include <string>
#include <system_error>
#include <thread>

#include "runtime/files/replace_file.h"
#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

namespace fs = std::filesystem;

void write_text_to(const fs::path& path, const std::string& text) {
  replace_file(path, [&](std::ostream& out) { out << text; });
}

int code_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::system_error& e) {
    return e.code().value();
  }
  return 0;
}

/// The exit code of a process that does this; 99 where it throws.
int in_child(const std::function<int()>& action) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      _exit(action());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "child: %s\n", e.what());
      _exit(99);
    }
  }
  int status = 0;
  EXPECT_EQ(child, waitpid(child, &status, 0));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(WriteTarget, LinksStayAndWhatTheyLeadToIsReplaced) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "far");
  write_file(folder / "far" / "file", std::string("old"));
  fs::create_symlink("far/file", folder / "link");
  fs::create_symlink("link", folder / "link of link");
  write_text_to(folder / "link of link", "new");
  EXPECT_EQ(read_file(folder / "far" / "file"), "new");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_TRUE(fs::is_symlink(folder / "link of link"));
  EXPECT_EQ(files_in(folder.path()), 3U);
  EXPECT_EQ(files_in(folder / "far"), 1U);

  fs::create_symlink("far/nothing yet", folder / "dangling");
  write_text_to(folder / "dangling", "first");
  EXPECT_TRUE(fs::is_symlink(folder / "dangling"));
  EXPECT_EQ(read_file(folder / "far" / "nothing yet"), "first");

  fs::create_symlink("loop", folder / "loop");
  EXPECT_EQ(code_of([&] { write_text_to(folder / "loop", "x"); }), ELOOP);
}

// A terminal of our own: no device of the machine is at stake where this goes wrong.
TEST(WriteTarget, ADeviceIsWrittenAndStaysADevice) {
  const TemporaryFolder folder;
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_TRUE(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
  const fs::path device = ptsname(terminal);
  const int kept = open(device.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC);
  fs::create_symlink(device, folder / "link");
  write_text_to(folder / "link", "seen ");
  write_text_to(device, "twice");
  // What was written in two calls may come in two.
  std::string seen;
  std::array<char, 32> some{};
  while (seen.size() < 10) {
    const ssize_t n = read(terminal, some.data(), some.size());
    ASSERT_GT(n, 0);
    seen.append(some.data(), static_cast<size_t>(n));
  }
  EXPECT_EQ(seen, "seen twice");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_TRUE(fs::is_character_file(device));
  EXPECT_EQ(code_of([&] { (void)replaceable_path(device); }), EINVAL);
  close(kept);
  close(terminal);
}

TEST(WriteTarget, AFifoIsWrittenForItsReader) {
  const TemporaryFolder folder;
  const fs::path fifo = folder / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const std::string text(300000, 'x');  // more than a pipe or a buffer holds
  std::string seen;
  std::thread reader([&] { seen = read_file(fifo); });
  { const NewFile asked(fifo); }  // and does not open it: the reader would see its end
  write_text_to(fifo, text);
  reader.join();
  EXPECT_EQ(seen, text);
  EXPECT_TRUE(fs::is_fifo(fifo));
  EXPECT_EQ(files_in(folder.path()), 1U);
}

TEST(WriteTarget, AReaderThatLeavesIsAnErrorAndEndsNoProcess) {
  const TemporaryFolder folder;
  const fs::path fifo = folder / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const int kept = open(fifo.c_str(), O_RDWR | O_CLOEXEC);  // lets the writer open
  NewFile file(fifo);
  file.stream() << 'x' << std::flush;
  close(kept);
  EXPECT_EQ(code_of([&] { file.stream() << 'y' << std::flush; }), EPIPE);
}

// As `keyhole ... --json /dev/stdout > file` has it.
TEST(WriteTarget, AnOwnDescriptorGoesOnWhereItStands) {
  const TemporaryFolder folder;
  const fs::path path = folder / "file";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(write(fd, "before ", 7), 7);
  fs::create_symlink("/dev/fd/" + std::to_string(fd), folder / "link");
  write_text_to(folder / "link", "json ");
  write_text_to("/proc/self/fd/" + std::to_string(fd), "again ");
  ASSERT_EQ(write(fd, "after", 5), 5);
  close(fd);
  EXPECT_EQ(read_file(path), "before json again after");
  EXPECT_EQ(code_of([&] { write_text_to("/dev/fd/" + std::to_string(fd), "x"); }), EBADF);
}

TEST(WriteTarget, RefusesBeforeTheWorkWhatCannotBeWritten) {
  const TemporaryFolder folder;
  EXPECT_EQ(code_of([&] { const NewFile file(folder.path()); }), EISDIR);
  EXPECT_EQ(code_of([] { const NewFile file(""); }), ENOENT);
  const fs::path socket_path = folder / "socket";
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_path.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(code_of([&] { const NewFile file(socket_path); }), ENXIO);
  close(fd);
  fs::create_symlink("new", folder / "link");
  EXPECT_EQ(replaceable_path(folder / "link"), folder / "new");
}

// A file that a container mounts by itself: no other file can take its name.
TEST(WriteTarget, AFileThatIsMountedByItselfIsWrittenOver) {
  const TemporaryFolder folder;
  const fs::path path = folder / "mounted", source = folder / "source";
  write_file(path, std::string());
  write_file(source, std::string("an old text that is longer than the new"));
  const int code = in_child([&] {
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return 77;
    if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
    if (mount(source.c_str(), path.c_str(), nullptr, MS_BIND, nullptr) != 0) return 77;
    write_text_to(path, "new");
    if (read_file(path) != "new") return 1;
    constexpr auto kReadOnly = MS_REMOUNT | MS_BIND | MS_RDONLY;
    if (mount(nullptr, path.c_str(), nullptr, kReadOnly, nullptr) != 0) return 77;
    return code_of([&] { const NewFile file(path); }) == EROFS ? 0 : 2;
  });
  if (code == 77) GTEST_SKIP() << "this process may mount nothing";
  EXPECT_EQ(code, 0) << "1: another content, 2: not refused where it is read-only, 99: an error";
  EXPECT_EQ(read_file(source), "new");
  EXPECT_EQ(files_in(folder.path()), 2U);
}

// What needs two users: root lays the ground, and becomes nobody.
TEST(WriteTarget, FoldersOfOthers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act for two users";
  constexpr uid_t kNobody = 65534, kOther = 65533;
  const TemporaryFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  const fs::path shared = folder / "shared", closed = folder / "closed";
  fs::create_directory(shared);
  fs::create_directory(closed);
  ASSERT_EQ(chmod(shared.c_str(), 01777), 0);
  write_file(folder / "victim", std::string("precious"));
  ASSERT_EQ(chown((folder / "victim").c_str(), kNobody, kNobody), 0);
  for (const char* name : {"planted", "fifo", "open", "locked"}) {
    const fs::path path = shared / name;
    if (name == std::string("planted")) {
      fs::create_symlink("../victim", path);
    } else if (name == std::string("fifo")) {
      ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
      ASSERT_EQ(chmod(path.c_str(), 0666), 0);
    } else {
      write_file(path, std::string("old"));
      ASSERT_EQ(chmod(path.c_str(), name == std::string("open") ? 0666 : 0644), 0);
    }
    ASSERT_EQ(lchown(path.c_str(), kOther, kOther), 0);
  }
  write_file(closed / "mine", std::string("an old text that is longer than the new"));
  ASSERT_EQ(chown((closed / "mine").c_str(), kNobody, kNobody), 0);
  const int code = in_child([&] {
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) return 77;
    if (code_of([&] { write_text_to(shared / "planted", "x"); }) != EACCES) return 1;
    if (code_of([&] { const NewFile file(shared / "fifo"); }) != EACCES) return 2;
    if (code_of([&] { const NewFile file(shared / "locked"); }) != EACCES) return 3;
    write_text_to(shared / "open", "through");
    if (code_of([&] { const NewFile file(closed / "none"); }) != EACCES) return 4;
    { const NewFile asked(closed / "mine"); }
    if (read_file(closed / "mine").size() < 10) return 5;
    write_text_to(closed / "mine", "new");
    return 0;
  });
  if (code == 77) GTEST_SKIP() << "this process cannot become another user";
  EXPECT_EQ(code, 0);
  EXPECT_EQ(read_file(folder / "victim"), "precious");
  EXPECT_EQ(read_file(shared / "open"), "through");
  EXPECT_EQ(read_file(closed / "mine"), "new");
  EXPECT_EQ(files_in(shared), 4U);
}

}  // namespace
}  // namespace keyhole
