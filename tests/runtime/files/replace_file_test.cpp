#include "runtime/files/replace_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <ostream>
#include <stdexcept>
#include <system_error>

#include "tests/temporary_folder.h"

namespace keyhole {
namespace {

size_t files_in(const TemporaryFolder& folder) {
  const std::filesystem::directory_iterator all(folder.path());
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST(ReplaceFile, WritesNewFilesAndReplacesOldOnes) {
  const TemporaryFolder folder;
  const auto path = folder / "file";
  const std::string long_text(100000, 'x');
  for (const std::string& text : {std::string("first"), long_text, std::string()}) {
    replace_file(path, [&](std::ostream& out) { out << text; });
    EXPECT_EQ(text, read_file(path));
    EXPECT_EQ(1U, files_in(folder)) << "nothing else is left";
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
  EXPECT_EQ(1U, files_in(folder));
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
  EXPECT_NE(error.find("cannot write " + path.string() + ".tmp"), std::string::npos) << error;
  EXPECT_EQ("old", read_file(path));
  EXPECT_EQ(1U, files_in(folder));
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
  EXPECT_EQ(1U, files_in(folder));
}

}  // namespace
}  // namespace keyhole
