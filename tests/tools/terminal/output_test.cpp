#include <gtest/gtest.h>

#include <stdexcept>

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

}  // namespace
}  // namespace keyhole::tools
