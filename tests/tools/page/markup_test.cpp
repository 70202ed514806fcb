#include "tools/page/markup.h"

#include <gtest/gtest.h>

#include <random>

#include "runtime/files/json.h"

namespace keyhole::tools {
namespace {

TEST(Markup, EscapesWhatWouldBeMarkup) {
  EXPECT_EQ(escaped("<script>alert(\"a\" & 'b')</script>"),
            "&lt;script&gt;alert(&quot;a&quot; &amp; &#39;b&#39;)&lt;/script&gt;");
  EXPECT_EQ(attribute("title", "\" onload=\"x"), " title=\"&quot; onload=&quot;x\"");
  EXPECT_EQ(escaped("a\nb\tc\x01\x7f"), "a\nb\tc\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(Markup, ReplacesBytesThatAreNoUtf8) {
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(escaped("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"),
            "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
  EXPECT_EQ(escaped("\xff"), bad);
  EXPECT_EQ(escaped("\xc3"), bad);                      // cut off
  EXPECT_EQ(escaped("\xc0\xbc"), bad + bad);            // '<' in two bytes
  EXPECT_EQ(escaped("\xed\xa0\x80"), bad + bad + bad);  // a surrogate
  EXPECT_EQ(escaped("\xe2\x82<"), bad + bad + "&lt;");
  // Whatever comes in, what comes out is UTF-8: the JSON library's own check is the judge.
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(random() % 12, ' ');
    for (char& c : bytes) c = static_cast<char>(random());
    EXPECT_NO_THROW((void)nlohmann::json(escaped(bytes)).dump()) << round;
  }
}

TEST(Markup, JsonCannotEndItsElement) {
  const nlohmann::ordered_json value = {{"</script><b>", "]]> <!-- & \xff"}};
  const std::string text = json_in_page(value);
  EXPECT_EQ(text.find_first_of("<>&"), std::string::npos) << text;
  const auto back = nlohmann::ordered_json::parse(text);
  EXPECT_EQ(back.begin().key(), "</script><b>");
  EXPECT_EQ(back.begin().value(), "]]> <!-- & \xef\xbf\xbd");
}

TEST(Markup, NumbersReadBackAsTheyWere) {
  for (const double value : {0.1, 1e-300, 12345678.9, 1.0 / 3}) {
    EXPECT_EQ(std::stod(exact_number(value)), value);
  }
  EXPECT_EQ(coordinate(1.005), coordinate(1.0049999));
}

}  // namespace
}  // namespace keyhole::tools
