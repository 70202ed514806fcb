// The pages of bench-step and calibrate say what their JSON says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "runtime/files/json.h"
#include "tests/tools/cli/html_data.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

// "55 us", "2.97 ms", "1.5 KiB", "0.0982", "9155": in microseconds, bytes, or as it is; "-" is nothing.
double shown_number(const std::string& cell) {
  if (cell == "-") return std::nan("");
  size_t read = 0;
  const double number = std::stod(cell, &read);
  const std::map<std::string, double> units = {
      {"", 1},   {" us", 1},       {" ms", 1e3},       {" s", 1e6},
      {" B", 1}, {" KiB", 1024.0}, {" MiB", 1048576.0}};
  return number * units.at(cell.substr(read));
}

// Cells of a printed line: columns are at least two spaces apart.
std::vector<std::string> printed_cells(const std::string& line) {
  std::vector<std::string> out;
  for (size_t at = 0; at < line.size();) {
    const size_t end = std::min(line.find("  ", at), line.size());
    out.push_back(line.substr(at, end - at));
    at = std::min(line.find_first_not_of(' ', end), line.size());
  }
  return out;
}

TEST(CommandPages, BenchStepShowsItsTimesAndStages) {
  const TemporaryFolder folder;
  const std::string out = folder / "step.json";
  const std::string page = folder / "step.html";
  const std::string picture = folder / "step.svg";
  const Outcome outcome = run_keyhole({"bench-step", "--synthetic",
                                       "--layers",   "2",
                                       "--q-heads",  "4",
                                       "--kv-heads", "2",
                                       "--head-dim", "64",
                                       "--context",  "2k",
                                       "--steps",    "4",
                                       "--warmup",   "2",
                                       "--sink",     "16",
                                       "--window",   "64",
                                       "--threads",  "2",
                                       "--device",   "host",
                                       "--index",    "ivf:C=16,probe=4",
                                       "--tail",     "second",
                                       "--compare",  "full",
                                       "--json",     out,
                                       "--html",     page,
                                       "--svg",      picture});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json document = json::parse(read_file(out));
  const std::string html = read_file(page);
  EXPECT_EQ(result_in_page(html), document);
  EXPECT_EQ(document["command"].get<std::string>().rfind("keyhole bench-step", 0), 0U);
  ASSERT_EQ(document["results"].size(), 2U);
  const std::vector<double> bars = drawn_bars(html);
  for (const json& row : document["results"]) {
    EXPECT_NE(std::find(bars.begin(), bars.end(), row["token_us"]["p50"].get<double>()),
              bars.end());
    const json& s = row["statistics"];
    const double attends = s["attends"].get<double>();
    EXPECT_NE(std::find_if(bars.begin(), bars.end(),
                           [&](double bar) {
                             return std::fabs(bar - 1e6 * s["offload_seconds"].get<double>() /
                                                        attends) < 1e-6 * bar;
                           }),
              bars.end());
    EXPECT_NE(html.find("<td class=\"text\">" + row["name"].get<std::string>() + "</td>"),
              std::string::npos);
  }
  // Every figure of the tables, on the page and on the terminal, is that of the JSON.
  size_t compared = 0;
  for (const json& row : document["results"]) {
    const std::string name = row["name"];
    const auto at = [&](const char* pointer) {
      const json::json_pointer p(pointer);
      return row.contains(p) && row[p].is_number() ? row[p].get<double>() : std::nan("");
    };
    // Of tails from 10 ms on: less is the time of finding none.
    const double tails = at("/tail_build_s") > 0.01 ? at("/tail_build_s") : 0.0;
    const double build = 1e6 * (at("/build_s") + tails);
    const std::vector<double> figures = {build == 0 ? std::nan("") : build,
                                         at("/layer_us/p50"),
                                         at("/layer_us/p95"),
                                         at("/layer_us/p99"),
                                         at("/token_us/p50"),
                                         at("/token_us/p95"),
                                         at("/tokens_per_second"),
                                         at("/statistics/bytes_read") / at("/statistics/attends"),
                                         at("/audit/error/median"),
                                         at("/audit/error/p95"),
                                         at("/audit/error/p99"),
                                         at("/audit/recall"),
                                         at("/audit/mass/mean")};
    std::vector<std::vector<std::string>> forms;
    for (const std::vector<std::string>& cells : table_rows(html)) {
      if (cells[0] == name) forms.push_back(cells);
    }
    std::istringstream lines(outcome.out);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind(name + "  ", 0) == 0) forms.push_back(printed_cells(line));
    }
    ASSERT_EQ(forms.size(), 2U) << name << "\n" << outcome.out;
    for (const std::vector<std::string>& cells : forms) {
      ASSERT_GE(cells.size(), 1 + figures.size()) << name;
      for (size_t c = 0; c < figures.size(); ++c) {
        const double shown = shown_number(cells[1 + c]);
        EXPECT_EQ(std::isnan(shown), std::isnan(figures[c])) << name << ", column " << c + 1;
        if (std::isnan(shown)) continue;
        // Three digits, times below a millisecond in whole microseconds.
        EXPECT_NEAR(shown, figures[c], std::max(5e-3 * figures[c], c < 6 ? 0.51 : 6e-5))
            << name << ", column " << c + 1;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 30U);
  EXPECT_EQ(document["results"][0]["series"], "ivf:C=16,probe=4");
  const std::vector<DrawnPoint> points = drawn_points(html);
  ASSERT_EQ(points.size(), 9U);  // the one that is no comparison
  EXPECT_EQ(points[0].x, document["results"][0]["layer_us"]["p50"].get<double>());
  EXPECT_EQ(points[0].y, document["results"][0]["audit"]["error"]["median"].get<double>());
  const std::string svg = read_file(picture);
  EXPECT_EQ(svg.rfind("<svg ", 0), 0U);
  const std::vector<DrawnPoint> pictured = drawn_points(svg);
  ASSERT_EQ(pictured.size(), 2U);
  EXPECT_EQ(pictured[0].x, points[0].x);
  EXPECT_EQ(pictured[0].y, points[0].y);
  const json& s = document["results"][0]["statistics"];
  EXPECT_EQ(pictured[1].x, s["index_bytes"].get<double>() + s["tail_bytes"].get<double>());
}

TEST(CommandPages, CalibrateMapsEveryHead) {
  const TemporaryFolder folder;
  std::mt19937 random(5);
  SyntheticShape shape;
  shape.tokens = 900;
  shape.queries = 24;
  make_synthetic_trace(shape, random).write(folder / "t.safetensors");
  const std::string out = folder / "heads.json";
  const std::string page = folder / "heads.html";
  const std::vector<std::string> args = {"calibrate",
                                         "--sink",
                                         "16",
                                         "--window",
                                         "32",
                                         "--kv-dtype",
                                         "f32",
                                         "--trace",
                                         folder / "t.safetensors",
                                         "--error",
                                         "0.2",
                                         "--index",
                                         "ivf:C=16,probe=2|8|16",
                                         "--attend",
                                         "topk:4",
                                         "--attend",
                                         "scored",
                                         "--tail",
                                         "none",
                                         "--target",
                                         "none",
                                         "--cost",
                                         "bytes",
                                         "--out",
                                         folder / "budgets.json"};
  std::vector<std::string> more = args;
  more.insert(more.end(), {"--json", out, "--html", page});
  const Outcome outcome = run_keyhole(more);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json document = json::parse(read_file(out));
  const std::string html = read_file(page);
  EXPECT_EQ(result_in_page(html), document);
  EXPECT_EQ(document["format"], "keyhole-calibration");
  ASSERT_EQ(document["heads"].size(), 4U);
  for (const char* field : {"middle_mass", "error_median", "read_share", "attended"}) {
    const std::vector<std::string> cells = heat_cells(html, field);
    ASSERT_EQ(cells.size(), 4U) << field;
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(std::stod(cells[i]), document["heads"][i][field].get<double>()) << field;
    }
  }
  // As the file of budgets says.
  const json budgets = json::parse(read_file(folder / "budgets.json"));
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(budgets["heads"][i]["measured"]["error_median"],
              document["heads"][i]["error_median"]);
    const std::string chosen = heat_cells(html, "index")[i];
    EXPECT_EQ(chosen.substr(0, 5), document["heads"][i]["index"].get<std::string>().substr(0, 5));
  }
  more = args;
  more.insert(more.end(), {"--html", "-"});
  EXPECT_EQ(run_keyhole(more).exit_code, 2);
}

}  // namespace
}  // namespace keyhole::tools
