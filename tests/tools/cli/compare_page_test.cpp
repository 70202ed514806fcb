// One result, five forms: the table, JSON, CSV, SVG and page of a comparison say the same.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <regex>
#include <sstream>

#include "tests/tools/cli/compare_fixture.h"
#include "tests/tools/cli/html_data.h"
#include "tools/terminal/units.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class ComparePage : public CompareFixture {
 protected:
  void SetUp() override {
    SyntheticShape shape;
    shape.queries = 4;
    html_path_ = folder_ / "page.html";
    csv_path_ = folder_ / "rows.csv";
    // What a path holds is text on the page, never markup.
    trace_ = write(make_synthetic_trace(shape, random_), "<b onclick='x'>&.safetensors");
    document_ = compare(
        trace_, {"--index", "ivf:C=16,probe=1|4|16", "--index", "flat", "--attend", "topk:20",
                 "--attend", "scored", "--csv", csv_path_, "--html", html_path_});
    html_ = read_file(html_path_);
  }

  std::string trace_, html_path_, csv_path_, html_;
  json document_;
};

double at(const json& row, const std::string& field) {
  const size_t dot = field.find('.');
  const json& value =
      dot == std::string::npos ? row[field] : row[field.substr(0, dot)][field.substr(dot + 1)];
  return value.get<double>();
}

TEST_F(ComparePage, CurvesHoldTheFiguresOfTheJson) {
  const json data = curves_data(html_);
  const json& summary = document_["summary"];
  ASSERT_EQ(summary.size(), 8U);
  ASSERT_EQ(data["points"].size(), summary.size());
  ASSERT_EQ(data["views"].size(), 1U + 4);
  std::map<std::string, size_t> heads;
  for (size_t v = 1; v < data["views"].size(); ++v) heads[data["views"][v]["name"]] = v;
  for (size_t q = 0; q < data["quantities"].size(); ++q) {
    const std::string field = data["quantities"][q]["field"];
    for (size_t p = 0; p < summary.size(); ++p) {
      EXPECT_EQ(data["views"][0]["values"][p][q].get<double>(), at(summary[p], field)) << field;
    }
    for (const json& row : document_["results"]) {
      const std::string head =
          "layer " + row["layer"].dump() + ", KV head " + row["kv_head"].dump();
      const std::string point =
          row["index"].get<std::string>() + ", " + row["attend"].get<std::string>();
      size_t p = 0;
      while (p < summary.size() && data["points"][p][1] != point) ++p;
      ASSERT_LT(p, summary.size()) << point;
      EXPECT_EQ(data["views"][heads.at(head)]["values"][p][q].get<double>(), at(row, field));
    }
  }
  // What is drawn without scripts is the first view.
  const std::vector<DrawnPoint> drawn = drawn_points(html_);
  ASSERT_EQ(drawn.size(), 9 * summary.size());
  for (const DrawnPoint& point : drawn) {
    const json& panel = data["panels"][point.panel];
    const json& values = data["views"][0]["values"][point.point];
    EXPECT_EQ(point.x, values[panel[0].get<size_t>()].get<double>());
    EXPECT_EQ(point.y, values[panel[1].get<size_t>()].get<double>());
  }
}

TEST_F(ComparePage, CarriesTheJsonAlong) {
  EXPECT_EQ(result_in_page(html_), document_);
  EXPECT_EQ(document_["format"], "keyhole-compare");
  EXPECT_EQ(document_["command"].get<std::string>().rfind("keyhole compare --trace ", 0), 0U);
}

TEST_F(ComparePage, CsvHoldsTheFiguresOfTheJson) {
  std::istringstream lines(read_file(csv_path_));
  std::string line;
  std::getline(lines, line);
  const std::vector<std::string> names = csv_cells(line);
  for (const json& row : document_["results"]) {
    ASSERT_TRUE(std::getline(lines, line));
    const std::vector<std::string> cells = csv_cells(line);
    ASSERT_EQ(cells.size(), names.size());
    for (size_t c = 0; c < names.size(); ++c) {
      std::string name = names[c];
      if (name.rfind("latency_us_", 0) == 0) name.replace(10, 1, ".");
      const json& value = name.find('.') == std::string::npos
                              ? row[name]
                              : row["latency_us"][name.substr(name.find('.') + 1)];
      if (value.is_string()) {
        EXPECT_EQ(cells[c], value.get<std::string>());
      } else if (value.is_null()) {
        EXPECT_EQ(cells[c], "") << name;
      } else {
        EXPECT_NEAR(std::stod(cells[c]), value.get<double>(), 1e-8 * std::fabs(value.get<double>()))
            << name;
      }
    }
  }
  EXPECT_FALSE(std::getline(lines, line));
}

TEST_F(ComparePage, TablesHoldTheFiguresOfTheJson) {
  char text[32];
  for (const json& row : document_["summary"]) {
    std::snprintf(text, sizeof text, "%.4f", row["output_error_median"].get<double>());
    const std::regex printed(
        std::regex_replace(row["index"].get<std::string>(), std::regex("[|:,=]"), "\\$&") + " +" +
        row["attend"].get<std::string>() + " +" + text + " ");
    EXPECT_TRUE(std::regex_search(out_, printed)) << text << "\n" << out_;
    EXPECT_NE(html_.find("<td class=\"text\">" + row["index"].get<std::string>() + "</td>"),
              std::string::npos);
    const std::string shown = format_number(row["output_error_median"]);
    EXPECT_NE(html_.find("<td>" + shown + "</td>"), std::string::npos) << shown;
  }
}

TEST_F(ComparePage, MarksTheParetoFronts) {
  const json& summary = document_["summary"];
  const std::map<std::string, std::string> costs = {
      {"time", "latency_us.p50"}, {"bytes", "bytes_per_step"}, {"memory", "memory_bytes_per_key"}};
  for (const json& row : summary) {
    for (const auto& [name, field] : costs) {
      bool beaten = false;
      for (const json& other : summary) {
        const double cost = at(other, field) - at(row, field);
        const double loss = at(other, "output_error_median") - at(row, "output_error_median");
        beaten = beaten || (cost <= 0 && loss <= 0 && (cost < 0 || loss < 0));
      }
      const json& fronts = row["pareto"];
      EXPECT_EQ(std::find(fronts.begin(), fronts.end(), name) == fronts.end(), beaten)
          << name << " " << row;
    }
  }
  EXPECT_NE(out_.find("  front\n"), std::string::npos) << out_;
}

TEST_F(ComparePage, HoldsNoMarkupOfTheUsers) {
  EXPECT_EQ(html_.find("<b onclick"), std::string::npos);
  EXPECT_NE(html_.find("&lt;b onclick=&#39;x&#39;&gt;&amp;.safetensors"), std::string::npos);
}

TEST_F(CompareFixture, AdvisesTheFastestThatKeepsAnError) {
  const std::string trace = write(make_synthetic_trace({}, random_));
  const std::string page = folder_ / "page.html";
  const json document = compare(trace, {"--index", "ivf:C=16,probe=1|16", "--rival", "pages:size=8",
                                        "--goal", "error=0.9", "--html", page});
  const json& advice = document["advice"];
  EXPECT_EQ(advice["goals"][0]["most"], 0.9);
  EXPECT_EQ(advice["candidates"], 2);
  const json* expected = nullptr;
  for (const json& row : document["summary"]) {
    const bool rival = row["index"] == "pages:size=8";
    if (rival || row["output_error_median"] > 0.9) continue;
    if (expected == nullptr || row["latency_us"]["p50"] < (*expected)["latency_us"]["p50"])
      expected = &row;
  }
  ASSERT_NE(expected, nullptr);
  EXPECT_EQ(advice["reached"], true);
  EXPECT_EQ(advice["index"], (*expected)["index"]);
  EXPECT_EQ(advice["latency_us_p50"], (*expected)["latency_us"]["p50"]);
  const std::string text = advice["text"];
  EXPECT_EQ(out_.substr(out_.size() - text.size()), text) << "the last of what is printed";
  EXPECT_NE(read_file(page).find("For error=0.9:\n  --index ivf:C=16,probe="), std::string::npos);
  const json none = compare(trace, {"--index", "ivf:C=16,probe=1", "--goal", "latency=0.001us"});
  EXPECT_EQ(none["advice"]["reached"], false);
  EXPECT_NE(out_.find("nothing that was measured reaches it"), std::string::npos) << out_;
  EXPECT_EQ(compare(trace, {"--index", "flat"})["advice"], nullptr);
}

TEST_F(CompareFixture, AnnCsvHasTheFieldsNames) {
  const std::string csv = folder_ / "ann.csv";
  const json document =
      compare(make_synthetic_trace({}, random_),
              {"--index", "ivf:C=16,probe=1|4", "--k", "10", "--tail", "second", "--ann-csv", csv});
  std::istringstream lines(read_file(csv));
  std::string line;
  std::getline(lines, line);
  const std::vector<std::string> names = csv_cells(line);
  for (const json& row : document["summary"]) {
    ASSERT_TRUE(std::getline(lines, line));
    const std::vector<std::string> cells = csv_cells(line);
    ASSERT_EQ(cells.size(), names.size());
    std::map<std::string, std::string> at_name;
    for (size_t i = 0; i < names.size(); ++i) at_name[names[i]] = cells[i];
    EXPECT_EQ(at_name["k"], "10");
    EXPECT_EQ(at_name["dataset"], "t");
    EXPECT_EQ(at_name["algorithm"], "ivf");
    EXPECT_EQ(at_name["params"],
              row["params"].get<std::string>() + " attend=topk:10 tail=second target=none");
    EXPECT_EQ(std::stod(at_name["recall"]), row["recall"].get<double>());
    const double us = row["latency_us"]["p50"];
    EXPECT_NEAR(std::stod(at_name["qps"]) * us, 2e6, 1);  // two query heads in a step
    EXPECT_NEAR(std::stod(at_name["p50"]) * 1000, us, 1e-9 * us);
    const double keys = document["options"]["offloaded"];
    EXPECT_NEAR(std::stod(at_name["distcomps"]), keys * row["scan_fraction"].get<double>(), 1e-6);
    EXPECT_EQ(std::stod(at_name["build_time"]), row["build_s_total"].get<double>());
    double bytes = 0;
    for (const json& head : document["results"]) {
      if (head["index"] == row["index"]) bytes += keys * head["memory_bytes_per_key"].get<double>();
    }
    EXPECT_NEAR(std::stod(at_name["index_size"]), bytes / 1024, 1e-6 * bytes);
  }
  EXPECT_FALSE(std::getline(lines, line));
}

TEST_F(CompareFixture, APageNeedsAFile) {
  expect_failure(
      run_keyhole({"compare", "--trace", "t.safetensors", "--index", "flat", "--html", "-"}), 2,
      "--html needs a file");
}

}  // namespace
}  // namespace keyhole::tools
