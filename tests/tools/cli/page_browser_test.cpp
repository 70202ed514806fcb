// Pages in a real browser: headless Chromium, where it is installed.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/tools/cli/compare_fixture.h"
#include "tests/tools/cli/html_data.h"
#include "tools/commands/calibrate/page.h"
#include "tools/commands/eval/page.h"

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

TEST_F(PageInBrowser, OtherCommandsToo) {
  const std::string step = folder_ / "step.html";
  ASSERT_EQ(run_keyhole({"bench-step", "--synthetic",
                         "--layers",   "1",
                         "--q-heads",  "4",
                         "--kv-heads", "2",
                         "--head-dim", "64",
                         "--context",  "1k",
                         "--steps",    "2",
                         "--warmup",   "1",
                         "--sink",     "16",
                         "--window",   "64",
                         "--threads",  "2",
                         "--device",   "host",
                         "--index",    "ivf:C=16,probe=4",
                         "--tail",     "second",
                         "--compare",  "full",
                         "--html",     step})
                .exit_code,
            0);
  expect_sound(read_file(step), 9);

  const nlohmann::ordered_json machine = {
      {"cpu", "a"},     {"cores", 2},        {"memory_bytes", 1 << 30},
      {"simd", "avx2"}, {"system", "Linux"}, {"keyhole", "1"}};
  // Many narrow cells, and some whose figures are nearly as wide as they are.
  for (const auto& [layers, kv_heads] : {std::pair(16, 32), std::pair(6, 8)}) {
    json heads = json::array();
    for (int layer = 0; layer < layers; ++layer) {
      for (int head = 0; head < kv_heads; ++head) {
        const double x = (layer * kv_heads + head + 1) / 12345.0;
        heads.push_back({{"layer", layer},
                         {"kv_head", head},
                         {"middle_mass", x},
                         {"dense", head == 3},
                         {"index", "ivf:probe=" + std::to_string(layer)},
                         {"budget", "topk:100"},
                         {"error_median", x / 10},
                         {"error_p95", x},
                         {"met", true},
                         {"held", head != 5},
                         {"attended", 1000 * x},
                         {"bytes", 1e6 * x},
                         {"us", 90 * x},
                         {"dense_bytes", 1e6},
                         {"dense_us", 100},
                         {"read_share", x},
                         {"held_bytes", 1e5}});
      }
    }
    expect_sound(calibration_page({{"format", "keyhole-calibration"},
                                   {"command", "keyhole calibrate"},
                                   {"machine", machine},
                                   {"requirement", {{"text", "95 % of steps below 0.075"}}},
                                   {"heads", heads}}),
                 0);
  }
}

TEST_F(PageInBrowser, HeadsToo) {
  SyntheticShape shape;
  shape.queries = 2;
  const std::string page = folder_ / "heads.html";
  ASSERT_EQ(run_keyhole({"heads", "--trace", write(make_synthetic_trace(shape, random_)), "--sink",
                         "16", "--window", "32", "--html", page})
                .exit_code,
            0);
  expect_sound(read_file(page), 0);
}

TEST_F(PageInBrowser, AnswersToo) {
  const nlohmann::ordered_json way = {
      {"k", 100},           {"attend", "topk:100"}, {"tail", "second"},
      {"target", "none"},   {"scan_fraction", 0.2}, {"build_s", 1},
      {"index_bytes", 1e6}, {"budgets", ""}};
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (int i = 1; i <= 4; ++i) {
    nlohmann::ordered_json row = way;
    row.update({{"index", "roargraph:M=16,ef=" + std::to_string(16 * i) + ",efc=512,lift=1"},
                {"correct", 10 + i},
                {"questions", 16},
                {"accuracy", (10 + i) / 16.0},
                {"lost", 6 - i},
                {"won", 0},
                {"tokens_per_second", 100.0 / i},
                {"attention_ms_per_token", 2.0 * i},
                {"bytes_read_per_token", 1e6 * i}});
    rows.push_back(row);
  }
  rows.push_back({{"index", "q8_0"},
                  {"budgets", ""},
                  {"k", nullptr},
                  {"attend", nullptr},
                  {"tail", nullptr},
                  {"target", nullptr},
                  {"correct", 16},
                  {"questions", 16},
                  {"accuracy", 1.0},
                  {"lost", 0},
                  {"won", 0},
                  {"scan_fraction", nullptr},
                  {"bytes_read_per_token", nullptr},
                  {"tokens_per_second", nullptr},
                  {"attention_ms_per_token", nullptr},
                  {"build_s", 0},
                  {"index_bytes", 0}});
  const std::string html = eval_page({{"command", "keyhole eval"},
                                      {"machine",
                                       {{"cpu", "a"},
                                        {"cores", 2},
                                        {"memory_bytes", 1 << 30},
                                        {"simd", ""},
                                        {"system", "Linux"},
                                        {"keyhole", "1"}}},
                                      {"model", "bundled"},
                                      {"device", "host"},
                                      {"session_device", "host"},
                                      {"task", "kv"},
                                      {"tokens", 4091},
                                      {"seed", 1},
                                      {"sink", 128},
                                      {"window", 512},
                                      {"kv_dtype", "bf16"},
                                      {"kv_host", "same"},
                                      {"threads", 2},
                                      {"prefill_s", 7.25},
                                      {"results", rows}});
  // Without a time the way is in the table and among the answers, and no point of the curves against time and bytes.
  expect_sound(html, 4 + 4 + 5);
  const std::vector<double> bars = drawn_bars(html);
  EXPECT_EQ(bars, (std::vector{11.0 / 16, 12.0 / 16, 13.0 / 16, 14.0 / 16, 1.0}));
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
