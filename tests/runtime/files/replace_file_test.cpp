#include "runtime/files/replace_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <ostream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

TEST(ReplaceFile, WritesNewFilesAndReplacesOldOnes) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  const std::string long_text(100000, 'x');
  for (const std::string& text : {std::string("first"), long_text, std::string()}) {
    replace_file(path, [&](std::ostream& out) { out << text; });
    EXPECT_EQ(text, read_file(path));
    EXPECT_EQ(1U, files_in(folder.path())) << "nothing else is left";
  }
}

TEST(ReplaceFile, TheOldFileIsThereUntilTheNewOneIsWhole) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  write_file(path, std::string("old"));
  replace_file(path, [&](std::ostream& out) {
    out << "new" << std::flush;
    EXPECT_EQ("old", read_file(path));
  });
  EXPECT_EQ("new", read_file(path));
}

TEST(ReplaceFile, AWriterThatThrowsLeavesTheOldFileAlone) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  write_file(path, std::string("old"));
  EXPECT_THROW(replace_file(path,
                            [](std::ostream& out) {
                              out << "half of the new";
                              throw std::runtime_error("planted");
                            }),
               std::runtime_error);
  EXPECT_EQ("old", read_file(path));
  EXPECT_EQ(1U, files_in(folder.path()));
}

TEST(ReplaceFile, ADiskThatIsFullLeavesTheOldFileAlone) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  write_file(path, std::string("old"));
  rlimit before{};
  ASSERT_EQ(0, getrlimit(RLIMIT_FSIZE, &before));
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);  // write() fails with EFBIG instead
  rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(0, setrlimit(RLIMIT_FSIZE, &small));
  std::string error;
  try {
    replace_file(path, [](std::ostream& out) { out << std::string(100000, 'x'); });
  } catch (const std::system_error& e) {
    error = e.what();
  }
  ASSERT_EQ(0, setrlimit(RLIMIT_FSIZE, &before));
  signal(SIGXFSZ, old_handler);
  EXPECT_NE(error.find("cannot write " + path.string()), std::string::npos) << error;
  EXPECT_EQ("old", read_file(path));
  EXPECT_EQ(1U, files_in(folder.path()));
}

TEST(ReplaceFile, AFolderThatIsNotThereIsReported) {
  const TemporaryFolder folder;
  try {
    replace_file(folder / "none" / "file", [](std::ostream&) { FAIL() << "nothing to write to"; });
    FAIL() << "no exception";
  } catch (const std::system_error& e) {
    EXPECT_EQ(ENOENT, e.code().value());
  }
}

TEST(ReplaceFile, ANameThatCannotBeReplacedLeavesNothingBehind) {
  const TemporaryFolder folder;
  const auto path = folder / "taken";
  std::filesystem::create_directory(path);
  EXPECT_THROW(replace_file(path, [](std::ostream& out) { out << "new"; }), std::system_error);
  EXPECT_TRUE(std::filesystem::is_directory(path));
  EXPECT_EQ(1U, files_in(folder.path()));
}

// What another user of the folder may have planted under a name that could be guessed.
TEST(ReplaceFile, FollowsAndRemovesNothingBesideThePath) {
  const TemporaryFolder folder;
  const auto path = folder / "file", victim = folder / "victim";
  write_file(victim, std::string("precious"));
  std::filesystem::create_symlink(victim, folder / "file.tmp");
  replace_file(path, [](std::ostream& out) { out << "new"; });
  EXPECT_EQ("new", read_file(path));
  EXPECT_EQ("precious", read_file(victim));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "file.tmp"));
  EXPECT_EQ(3U, files_in(folder.path()));
}

TEST(ReplaceFile, ManyWritersAtOnceLeaveTheWholeFileOfOne) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  std::vector<std::thread> writers;
  for (char c = 'a'; c < 'e'; ++c) {
    writers.emplace_back([&path, c] {
      for (int i = 0; i < 50; ++i) {
        replace_file(path, [c](std::ostream& out) {
          for (int piece = 0; piece < 30; ++piece) out << std::string(10'000, c);
        });
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string text = read_file(path);
  EXPECT_EQ(text, std::string(300'000, text.at(0)));
  EXPECT_EQ(1U, files_in(folder.path()));
}

TEST(ReplaceFile, AWriterThatIsKilledLeavesTheWholeOldFileOrTheWholeNew) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  const auto write = [&](char c) {
    replace_file(path, [c](std::ostream& out) {
      for (int piece = 0; piece < 100; ++piece) out << std::string(10'000, c);
    });
  };
  write('a');
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (char c = 'a';; c = c == 'z' ? 'a' : static_cast<char>(c + 1)) write(c);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500 + 731 * round));
    ASSERT_EQ(0, kill(child, SIGKILL));
    ASSERT_EQ(child, waitpid(child, nullptr, 0));
    const std::string text = read_file(path);
    ASSERT_EQ(text, std::string(1'000'000, text.at(0)));
  }
}

TEST(ReplaceFile, CanBeReadByItsOwnerAloneWhereAsked) {
  const TemporaryFolder folder;
  const auto mode_of = [](const std::filesystem::path& path) {
    return static_cast<unsigned>(std::filesystem::status(path).permissions());
  };
  const mode_t before = umask(022);
  const auto write = [](std::ostream& out) { out << "text"; };
  replace_file(folder / "shared", write);
  replace_file(folder / "own", write, NewFile::Access::owner);
  write_file(folder / "was shared", std::string("old"));
  replace_file(folder / "was shared", write, NewFile::Access::owner);
  umask(before);
  EXPECT_EQ(mode_of(folder / "shared"), 0644U);
  EXPECT_EQ(mode_of(folder / "own"), 0600U);
  EXPECT_EQ(mode_of(folder / "was shared"), 0600U);
}

}  // namespace
}  // namespace keyhole
