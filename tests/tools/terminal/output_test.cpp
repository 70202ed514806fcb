#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "tools/terminal/progress.h"
#include "tools/terminal/style.h"
#include "tools/terminal/table.h"

namespace keyhole::tools {
namespace {

constexpr Style kPlain{false, false};
constexpr Style kRich{true, true};

TEST(Table, AlignsColumnsAndTrimsLines) {
  Table table({{"index", Table::Align::left}, {"recall"}, {"note", Table::Align::left}});
  table.add_row({"flat", "1", ""});
  table.add_row({"hnsw:M=32", "0.987", "graph"});
  EXPECT_EQ(table.text(kPlain),
            "index      recall  note\n"
            "---------  ------  -----\n"
            "flat            1\n"
            "hnsw:M=32   0.987  graph\n");
  EXPECT_THROW(table.add_row({"one cell"}), std::invalid_argument);
}

TEST(Table, CountsCharactersNotBytes) {
  Table table({{"a", Table::Align::left}, {"b", Table::Align::left}});
  table.add_row({"\xc3\xa9t\xc3\xa9", "x"});
  table.add_row({tinted("red", Tint::red, kRich), "y"});
  const std::string text = table.text(kPlain);
  EXPECT_NE(text.find("\xc3\xa9t\xc3\xa9  x\n"), std::string::npos) << text;
  EXPECT_NE(text.find("red\033[0m  y\n"), std::string::npos) << text;
}

TEST(Style, TintsOnlyWhereItMay) {
  EXPECT_EQ(tinted("text", Tint::green, kPlain), "text");
  EXPECT_EQ(tinted("text", Tint::none, kRich), "text");
  EXPECT_EQ(tinted("text", Tint::green, kRich), "\033[32mtext\033[0m");
  EXPECT_EQ(display_width("\033[32mtext\033[0m"), 4U);
  EXPECT_EQ(display_width("\xe2\x94\x80\xe2\x94\x80"), 2U);
}

TEST(Style, FilesAreNeverDecorated) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  const Style style = style_of(file);
  EXPECT_FALSE(style.colour);
  EXPECT_FALSE(style.unicode);
  std::fclose(file);
}

TEST(ProgressLine, TellsShareAndTimeLeft) {
  EXPECT_EQ(progress_line("work", 0.5, 60, 80, false),
            "work ###############...............  50%  1 min 00 s left");
  // Too early to tell, or done: no time.
  EXPECT_EQ(progress_line("work", 0.01, 60, 80, false), "work ..............................   1%");
  EXPECT_EQ(progress_line("work", 1, 60, 80, false), "work ############################## 100%");
}

TEST(ProgressLine, StaysWithinTheTerminal) {
  for (size_t columns = 0; columns < 120; ++columns) {
    for (const double fraction : {-1.0, 0.0, 0.3, 1.0, 7.0, 0.0 / 0.0}) {
      const std::string line =
          progress_line("a rather long title of the work", fraction, 9, columns, true);
      EXPECT_LE(display_width(line), columns) << line;
    }
  }
}

/// While it lives, standard error is a terminal.
class TerminalForErrors {
 public:
  TerminalForErrors() : former_(dup(STDERR_FILENO)), master_(posix_openpt(O_RDWR | O_NOCTTY)) {
    if (master_ < 0 || grantpt(master_) != 0 || unlockpt(master_) != 0) return;
    const int terminal = open(ptsname(master_), O_RDWR | O_NOCTTY);
    if (terminal < 0) return;
    std::fflush(stderr);
    is_there_ = dup2(terminal, STDERR_FILENO) >= 0;
    close(terminal);
  }
  ~TerminalForErrors() {
    std::fflush(stderr);
    dup2(former_, STDERR_FILENO);
    close(former_);
    if (master_ >= 0) close(master_);
  }
  TerminalForErrors(const TerminalForErrors&) = delete;
  TerminalForErrors& operator=(const TerminalForErrors&) = delete;
  [[nodiscard]] bool is_there() const { return is_there_; }
  /// What it has been sent since the last call.
  [[nodiscard]] std::string shown() const {
    std::fflush(stderr);
    fcntl(master_, F_SETFL, O_NONBLOCK);
    std::string text(4096, ' ');
    const ssize_t n = read(master_, text.data(), text.size());
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text;
  }

 private:
  int former_, master_;
  bool is_there_ = false;
};

TEST(Progress, IsHiddenWhileTheLineIsAnAnswers) {
  const TerminalForErrors terminal;
  if (!terminal.is_there()) GTEST_SKIP() << "the system gives no terminal";
  {
    Progress bar("work");
    std::this_thread::sleep_for(std::chrono::milliseconds(2100));  // bars wait for two seconds
    {
      const HiddenProgress answer;
      bar.update(0.4);
    }
    EXPECT_EQ(terminal.shown(), "");
    bar.update(0.5);
    EXPECT_NE(terminal.shown().find("50%"), std::string::npos);
  }
  EXPECT_EQ(terminal.shown(), "\r\033[K");
}

}  // namespace
}  // namespace keyhole::tools
