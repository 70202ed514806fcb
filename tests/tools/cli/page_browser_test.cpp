// Pages in a real browser: headless Chromium, where it is installed.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/tools/cli/compare_fixture.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

std::string output_of(const std::string& command) {
  std::string out;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return out;
  std::array<char, 4096> buffer{};
  for (size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    out.append(buffer.data(), n);
  }
  pclose(pipe);
  return out;
}

std::string browser() {
  std::string found =
      output_of("command -v chromium || command -v chromium-browser || command -v google-chrome");
  while (!found.empty() && found.back() == '\n') found.pop_back();
  return found;
}

std::string as_attribute(const std::string& html) {
  std::string out;
  for (const char c : html) out += c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
  return out;
}

// A document with the page in a frame of each width, and the probe.
std::string probed(std::string html) {
  const std::string head = "<head>\n";
  html.insert(html.find(head) + head.size(),
              "<script>window.probeErrors = [];"
              "addEventListener('error', (e) => probeErrors.push(e.message));"
              "addEventListener('securitypolicyviolation', (e) => probeErrors.push('asks for ' + "
              "e.blockedURI));</script>\n");
  std::string out = "<!DOCTYPE html><html><body>\n";
  for (const char* width : {"1280", "390"}) {
    out += "<iframe style=\"border:0;height:900px;width:" + std::string(width) + "px\" srcdoc=\"" +
           as_attribute(html) + "\"></iframe>\n";
  }
  return out + "<script>" + read_file(KEYHOLE_PAGE_PROBE) + "</script></body></html>\n";
}

class PageInBrowser : public CompareFixture {
 protected:
  void SetUp() override {
    chromium_ = browser();
    if (chromium_.empty()) GTEST_SKIP() << "no chromium here: nothing looks at the page";
  }

  /// What the probe says of the page: an object for each width.
  [[nodiscard]] json probe(const std::string& html) const {
    const std::string document = folder_ / "probed.html";
    write_file(document, probed(html));
    const std::string dom = output_of(
        "'" + chromium_ +
        "' --headless --no-sandbox --disable-gpu --virtual-time-budget=20000 "
        "--window-size=1400,1000 --user-data-dir='" +
        (folder_ / "profile").string() + "' --dump-dom 'file://" + document + "' 2>/dev/null");
    const std::string mark = "<pre id=\"report\">";
    const size_t begin = dom.find(mark);
    if (begin == std::string::npos) return json::array();
    std::string text = dom.substr(begin + mark.size());
    text.resize(text.find("</pre>"));
    for (const auto& [entity, c] : {std::pair("&lt;", "<"), {"&gt;", ">"}, {"&amp;", "&"}}) {
      for (size_t at; (at = text.find(entity)) != std::string::npos;) {
        text.replace(at, std::string(entity).size(), c);
      }
    }
    return json::parse(text);
  }

  void expect_sound(const std::string& html, size_t points) const {
    const json report = probe(html);
    ASSERT_EQ(report.size(), 2U) << report;
    for (const json& frame : report) {
      EXPECT_EQ(frame["problems"], json::array()) << frame.dump(2);
      EXPECT_EQ(frame["points"], points);
      EXPECT_GT(frame["hovered"], 0);
    }
    EXPECT_EQ(report[0]["width"], 1280);
    EXPECT_EQ(report[1]["width"], 390);
  }

  std::string chromium_;
};

TEST_F(PageInBrowser, ComparisonsCanBeReadHoveredAndToggled) {
  SyntheticShape shape;
  shape.queries = 4;
  shape.tokens = 300;
  const std::string path = folder_ / "page.html";
  (void)compare(make_synthetic_trace(shape, random_),
                {"--index", "ivf:C=8,probe=1|4|8", "--index", "roargraph:M=4,ef=8|16", "--index",
                 "flat", "--attend", "topk:20", "--attend", "weight:0.001", "--tail", "none",
                 "--tail", "second", "--html", path});
  const std::string html = read_file(path);
  expect_sound(html, 9U * 6 * 4);
}

TEST_F(PageInBrowser, TheProbeSeesWhatIsWrong) {
  const json report = probe(
      "<!DOCTYPE html><html><head>\n</head><body><main><h1 style='width:2000px'>wide</h1><p "
      "style='margin-top:-40px'>over it</p></main><div id=tip hidden></div><script>nothing.at.all"
      "</script></body></html>");
  ASSERT_EQ(report.size(), 2U) << report;
  for (const json& frame : report) EXPECT_GE(frame["problems"].size(), 3U) << frame;
}

}  // namespace
}  // namespace keyhole::tools
