// The names that --index takes beside index specs.
#include "tools/commands/common/ways.h"

#include <gtest/gtest.h>

#include <set>

namespace keyhole::tools {
namespace {

TEST(NamedWays, AreFoundByNameAndExplained) {
  std::set<std::string_view> names;
  for (const NamedWay& way : named_ways()) {
    EXPECT_TRUE(names.insert(way.name).second) << way.name << " occurs twice";
    EXPECT_EQ(find_way(way.name), &way);
    EXPECT_NE(ways_help().find(std::string(way.name) + " (" + std::string(way.meaning) + ")"),
              std::string::npos);
    // Tokens in 8 or 4 bits are attended all, and nothing is searched.
    EXPECT_NE(way.mode, KEYHOLE_MODE_INDEXED);
    EXPECT_TRUE(!way.format || way.mode == KEYHOLE_MODE_EXACT);
  }
  EXPECT_EQ(find_way("none")->mode, KEYHOLE_MODE_RESIDENT);
  EXPECT_EQ(find_way("exact")->mode, KEYHOLE_MODE_EXACT);
  EXPECT_EQ(find_way("full")->mode, KEYHOLE_MODE_EXACT);
  EXPECT_EQ(find_way("q4_0")->format, KvFormat::q4_0);
  EXPECT_EQ(find_way("q8_0")->format, KvFormat::q8_0);
  EXPECT_EQ(find_way("q4_0_plain")->format, KvFormat::q4_0_plain);
  EXPECT_EQ(find_way("flat"), nullptr);
  EXPECT_EQ(find_way(""), nullptr);
  EXPECT_EQ(find_way("ivf:C=16"), nullptr);
}

}  // namespace
}  // namespace keyhole::tools
