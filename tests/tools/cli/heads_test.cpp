// keyhole heads against the softmax in double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <sstream>

#include "tests/tools/cli/compare_fixture.h"
#include "tests/tools/cli/html_data.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class Heads : public CompareFixture {};

size_t covering(std::vector<double> weights, double share) {
  std::sort(weights.rbegin(), weights.rend());
  const double wanted = share * std::accumulate(weights.begin(), weights.end(), 0.0);
  size_t count = 0;
  for (double sum = 0; count < weights.size() && sum < wanted; ++count) sum += weights[count];
  return count;
}

TEST_F(Heads, AreWhatTheSoftmaxSays) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  SyntheticShape shape;
  shape.queries = 5;
  const SyntheticTrace trace = make_synthetic_trace(shape, random_);
  const std::string out = folder_ / "heads.json";
  const std::string csv = folder_ / "heads.csv";
  const std::string page = folder_ / "heads.html";
  const Outcome outcome =
      run_keyhole({"heads", "--trace", write(trace), "--sink", "16", "--window", "32", "--mass",
                   "0.8", "--json", out, "--csv", csv, "--html", page});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json document = json::parse(read_file(out));
  ASSERT_EQ(document["heads"].size(), 4U);
  const size_t end = trace.options.query_positions.front() + 1 - kWindow;
  for (size_t head = 0; head < 4; ++head) {
    double sink = 0, window = 0, middle = 0, largest = 0, tokens = 0, middle_tokens = 0,
           sparsity = 0;
    const double rows = shape.queries * shape.group;
    for (size_t q = 0; q < shape.queries; ++q) {
      for (size_t j = 0; j < shape.group; ++j) {
        std::vector<double> weights;
        for (size_t t = 0; t <= trace.options.query_positions[q]; ++t) {
          weights.push_back(std::exp(trace.logit(head, q, j, t)));
        }
        const auto at = [&](size_t i) { return weights.begin() + static_cast<ptrdiff_t>(i); };
        const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
        sink += std::accumulate(weights.begin(), at(kSink), 0.0) / all / rows;
        middle += std::accumulate(at(kSink), at(end), 0.0) / all / rows;
        window += std::accumulate(at(end), weights.end(), 0.0) / all / rows;
        largest += *std::max_element(weights.begin(), weights.end()) / all / rows;
        const auto covers = static_cast<double>(covering(weights, 0.8));
        tokens += covers / rows;
        sparsity += (1 - covers / static_cast<double>(weights.size())) / rows;
        middle_tokens += static_cast<double>(covering({at(kSink), at(end)}, 0.8)) / rows;
      }
    }
    const json& row = document["heads"][head];
    EXPECT_EQ(row["layer"], head / 2 * 3 + 1);
    EXPECT_EQ(row["kv_head"], head % 2);
    EXPECT_NEAR(row["sink_mass"], sink, 1e-5);
    EXPECT_NEAR(row["window_mass"], window, 1e-5);
    EXPECT_NEAR(row["middle_mass"], middle, 1e-5);
    EXPECT_NEAR(row["largest_weight"], largest, 1e-5);
    // Sums in fp32 may cross the share one token earlier or later.
    EXPECT_NEAR(row["tokens"], tokens, 0.5);
    EXPECT_NEAR(row["middle_tokens"], middle_tokens, 0.5);
    EXPECT_NEAR(row["sparsity"], sparsity, 2e-3);
    EXPECT_GE(row["tokens_p95"], row["tokens"]);
  }
  // compare shows the same of its heads, whatever is compared.
  const std::string compared_page = folder_ / "compare.html";
  const json compared = compare(trace, {"--index", "flat", "--html", compared_page});
  const std::vector<std::string> sparsity_cells = heat_cells(read_file(compared_page), "sparsity");
  ASSERT_EQ(sparsity_cells.size(), 4U);
  const std::string usual = folder_ / "usual.json";
  ASSERT_EQ(run_keyhole({"heads", "--trace", folder_ / "t.safetensors", "--sink", "16", "--window",
                         "32", "--json", usual})
                .exit_code,
            0);
  const json heads = json::parse(read_file(usual))["heads"];
  for (size_t head = 0; head < 4; ++head) {
    EXPECT_EQ(compared["results"][head]["sparsity"], heads[head]["sparsity"]);
    EXPECT_EQ(std::stod(sparsity_cells[head]), heads[head]["sparsity"].get<double>());
  }
  // The same in every form.
  const std::string html = read_file(page);
  EXPECT_EQ(result_in_page(html), document);
  std::istringstream lines(read_file(csv));
  std::string line;
  std::getline(lines, line);
  const std::vector<std::string> names = csv_cells(line);
  for (size_t head = 0; head < 4; ++head) {
    const json& row = document["heads"][head];
    ASSERT_TRUE(std::getline(lines, line));
    const std::vector<std::string> cells = csv_cells(line);
    ASSERT_EQ(cells.size(), row.size());
    for (size_t c = 0; c < cells.size(); ++c)
      EXPECT_EQ(std::stod(cells[c]), row[names[c]].get<double>());
    EXPECT_EQ(std::stod(heat_cells(html, "tokens")[head]), row["tokens"].get<double>());
    char mass[16];
    std::snprintf(mass, sizeof mass, "%.2f %%", 100 * row["middle_mass"].get<double>());
    EXPECT_NE(outcome.out.find(mass), std::string::npos) << mass << "\n" << outcome.out;
  }
}

TEST_F(Heads, RefuseWhatCannotBe) {
  const std::string trace = write(make_synthetic_trace({}, random_));
  const auto refused = [&](int exit_code, std::vector<std::string> args, const std::string& part) {
    args.insert(args.begin(), "heads");
    expect_failure(run_keyhole(args), exit_code, part);
  };
  refused(2, {"--trace", trace, "--mass", "1"}, "--mass is 1; allowed");
  for (const char* nan : {"nan", "NaN", "-nan"}) {
    refused(2, {"--trace", trace, "--mass", nan}, std::string(nan) + " is no number");
  }
  refused(2, {"--trace", trace, "--sink", "500", "--window", "500"}, "cover all");
  refused(2, {"--trace", trace, "--task", "kv"}, "--task");
  refused(2, {"--trace", trace, "--html", "-"}, "--html");
  refused(1, {"--trace", folder_ / "absent"}, "absent");
}

}  // namespace
}  // namespace keyhole::tools
