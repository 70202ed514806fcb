#include "tools/page/page.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>

#include "runtime/files/json.h"

namespace keyhole::tools {
namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

constexpr const char* kEvil = "<img src=x onerror=alert(1)>\"'&</script>";

Curves small_curves(const std::string& name) {
  Curves curves;
  curves.quantities = {{"us", "time, us", Scale::log}, {"error", "error", Scale::log, 1e-3}};
  curves.panels = {{0, 1}};
  for (int i = 0; i < 3; ++i) {
    curves.points.push_back({curves.series_of(name, "topk"), name + std::to_string(i)});
  }
  curves.points.push_back({curves.series_of("flat", "topk"), "flat"});
  curves.views = {{"all", {{10, 0.1}, {20, 0.05}, {40, 0.06}, {80, 0}}},
                  {"head", {{1, 0.2}, {2, std::nan("")}, {3, 0.1}, {4, 1e-9}}}};
  return curves;
}

TEST(Page, EscapesEveryTextThatItIsGiven) {
  Page page(kEvil);
  page.fact(kEvil, kEvil);
  page.section(kEvil, kEvil);
  page.add(small_curves(kEvil));
  HeatMap map;
  map.title = map.field = kEvil;
  map.rows = map.columns = {kEvil};
  map.values = {0};
  HeatMap named = map;
  named.names = {kEvil};
  page.add(std::vector{map, named});
  page.add(Bars{{kEvil, kEvil}, kEvil, {{kEvil, {1, 2}, kEvil}}, 0});
  page.add(PageTable{{{kEvil, true}}, {{kEvil}}, {}});
  page.verbatim(kEvil);
  const std::string html = page.html({{kEvil, kEvil}});
  EXPECT_EQ(count(html, "<img"), 0U);
  EXPECT_EQ(count(html, "onerror=alert(1)>"), 0U);
  // The page's own: the curves' data, the result, the script.
  EXPECT_EQ(count(html, "</script>"), 3U);
  EXPECT_GT(count(html, "&lt;img src=x"), 15U);
}

TEST(Page, AsksNoNetwork) {
  Page page("t");
  page.add(small_curves("ivf"));
  const std::string html = page.html({{"a", 1}});
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
  std::string rest = html;
  // The name of SVG's namespace is no address that anybody asks.
  for (size_t at; (at = rest.find("http://www.w3.org/2000/svg")) != std::string::npos;)
    rest.erase(at, 26);
  EXPECT_EQ(rest.find("http:"), std::string::npos);
  EXPECT_EQ(rest.find("https:"), std::string::npos);
  EXPECT_EQ(rest.find("@import"), std::string::npos);
  EXPECT_EQ(rest.find("url("), std::string::npos);
  EXPECT_EQ(rest.find(" src="), std::string::npos);
}

TEST(Page, DrawsEveryPointWithoutScripts) {
  const std::string html = curves_html(small_curves("ivf"));
  const std::regex circle(
      "data-point=\"([0-9]+)\" data-x=\"([^\"]+)\" data-y=\"([^\"]+)\" cx=\"([^\"]+)\" "
      "cy=\"([^\"]+)\"");
  std::vector<std::vector<double>> found;
  for (std::sregex_iterator it(html.begin(), html.end(), circle), end; it != end; ++it) {
    found.emplace_back();
    for (size_t i = 1; i <= 5; ++i) found.back().push_back(std::stod((*it)[i]));
  }
  ASSERT_EQ(found.size(), 4U);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(found[i][0], static_cast<double>(i));
  EXPECT_EQ(found[3][2], 0) << "the value itself, although it is drawn at the limit";
  // Each doubling of the time goes as far to the right; of the errors 0.1 to 0.05 as far down as 0.1 / 0.05 says.
  const double doubling = found[1][3] - found[0][3];
  EXPECT_NEAR(found[2][3] - found[1][3], doubling, 0.02);
  EXPECT_NEAR(found[3][3] - found[2][3], doubling, 0.02);
  const double decade = (found[3][4] - found[0][4]) / 2;  // from 0.1 to 0.001, the limit
  EXPECT_NEAR(found[1][4] - found[0][4], decade * std::log10(2), 0.02);
  EXPECT_EQ(count(html, "class=\"point front\""), 3U);  // 40 us, 0.06 is beaten by 20 us, 0.05
}

TEST(Page, CarriesTheResultAlong) {
  const nlohmann::ordered_json result = {{"x", 0.1}, {"text", "a<b"}};
  const std::string html = Page("t").html(result);
  const std::string mark = "id=\"result\">";
  const size_t begin = html.find(mark) + mark.size();
  EXPECT_EQ(
      nlohmann::ordered_json::parse(html.substr(begin, html.find("</script>", begin) - begin)),
      result);
}

TEST(Page, HeatMapsShowEveryCell) {
  HeatMap map;
  map.title = "mass";
  map.field = "middle_mass";
  map.rows = {"0", "3"};
  map.columns = {"0", "1"};
  map.values = {0.25, 0.5, std::nan(""), 1};
  const std::string html = heat_maps_html({map});
  EXPECT_EQ(count(html, "data-value="), 3U);
  EXPECT_EQ(count(html, "cell unknown"), 1U);
  EXPECT_NE(html.find("layer 3, KV head 1\nmass: 1"), std::string::npos) << html;
  EXPECT_EQ(heat_maps_html({HeatMap{}}).find("<svg"), std::string::npos);
}

TEST(Page, BarsFillTheirWidth) {
  const std::string html = bars_html(
      {{"search", "attend"}, "us", {{"a", {1, 3}, "4"}, {"b", {2, std::nan("")}, "2"}}, 0});
  EXPECT_NE(html.find("x=\"0.00\" y=\"0\" width=\"250.00\""), std::string::npos) << html;
  EXPECT_NE(html.find("x=\"250.00\" y=\"0\" width=\"750.00\""), std::string::npos) << html;
  EXPECT_NE(html.find("x=\"0.00\" y=\"0\" width=\"500.00\""), std::string::npos) << html;
}

}  // namespace
}  // namespace keyhole::tools
