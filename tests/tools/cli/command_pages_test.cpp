// The pages of bench-step and calibrate say what their JSON says.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tests/tools/cli/html_data.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

TEST(CommandPages, BenchStepShowsItsTimesAndStages) {
  const TemporaryFolder folder;
  const std::string out = folder / "step.json";
  const std::string page = folder / "step.html";
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
                                       "--html",     page});
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
  const std::vector<DrawnPoint> points = drawn_points(html);
  ASSERT_EQ(points.size(), 9U);  // the one that is no comparison
  EXPECT_EQ(points[0].x, document["results"][0]["layer_us"]["p50"].get<double>());
  EXPECT_EQ(points[0].y, document["results"][0]["audit"]["error"]["median"].get<double>());
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
