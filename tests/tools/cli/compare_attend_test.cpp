// What compare says of each way to attend, of sweeps, and in pictures.
#include "tests/tools/cli/compare_fixture.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class CompareAttend : public CompareFixture {};

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

TEST_F(CompareAttend, ReportsWhatTheDefinitionsSay) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (const float softcap : {0.0F, 3.0F}) {
    SyntheticShape shape;
    shape.softcap = softcap;
    const SyntheticTrace trace = make_synthetic_trace(shape, random_);
    const json result = compare(trace, {"--index", "flat", "--k", "10", "--attend", "weight:0.01",
                                        "--attend", "scored", "--attend", "topk:5"});
    ASSERT_EQ(result["results"].size(), 12U);
    const auto offloaded = result["options"]["offloaded"].get<double>();
    for (size_t head = 0; head < 4; ++head) {
      SCOPED_TRACE("softcap " + std::to_string(softcap) + ", head " + std::to_string(head));
      const json& weight = result["results"][head];
      EXPECT_EQ(weight["attend"], "weight:0.01");
      const ExactSearch expected = exact_search(trace, head, 10, kSink, kWindow, 0.01);
      // A key on the edge may fall to either side, which moves a mean over 18 searches a little.
      EXPECT_NEAR(weight["recall"], expected.recall, 0.02);
      EXPECT_NEAR(weight["recovered_mass"], expected.recovered_mass, 2e-3);
      EXPECT_NEAR(weight["keys_attended"], expected.keys_attended, 0.5);
      EXPECT_NEAR(weight["output_error"], mean(expected.errors), 5e-3);
      // K once for the scan, V of what is attended.
      EXPECT_NEAR(weight["bytes_per_step"],
                  (offloaded + weight["keys_attended"].get<double>()) * 256, 1);

      const json& scored = result["results"][4 + head];
      EXPECT_EQ(scored["attend"], "scored");
      EXPECT_EQ(scored["recall"], 1.0);
      EXPECT_EQ(scored["keys_attended"], offloaded);
      EXPECT_NEAR(scored["recovered_mass"], 1, 1e-5);
      EXPECT_LT(scored["output_error"], 1e-5);
      EXPECT_NEAR(scored["bytes_per_step"], 2 * offloaded * 256, 1);

      // Five of the ten that recall asks for.
      const json& five = result["results"][8 + head];
      EXPECT_EQ(five["attend"], "topk:5");
      EXPECT_EQ(five["recall"], 0.5);
      EXPECT_NEAR(five["recovered_mass"],
                  exact_search(trace, head, 5, kSink, kWindow).recovered_mass, 1e-5);
    }
  }
}

TEST_F(CompareAttend, EveryIndexWithEveryWay) {
  const json result = compare(make_synthetic_trace({}, random_),
                              {"--index", "flat", "--index", "ivf:C=8,probe=2", "--attend", "topk",
                               "--attend", "scored", "--k", "10", "--per-head"});
  ASSERT_EQ(result["summary"].size(), 4U);
  const char* expected[][2] = {{"flat", "topk:10"},
                               {"flat", "scored"},
                               {"ivf:C=8,probe=2", "topk:10"},
                               {"ivf:C=8,probe=2", "scored"}};
  for (size_t i = 0; i < 4; ++i) {
    const json& summary = result["summary"][i];
    EXPECT_EQ(summary["index"], expected[i][0]);
    EXPECT_EQ(summary["attend"], expected[i][1]);
    double error = 0;
    size_t heavy = 0;
    for (size_t head = 0; head < 4; ++head) {
      const json& row = result["results"][4 * i + head];
      EXPECT_EQ(row["index"], summary["index"]);
      EXPECT_EQ(row["attend"], summary["attend"]);
      if (row["middle_mass"] < 0.2) continue;
      ++heavy;
      error += row["output_error"].get<double>();
    }
    EXPECT_EQ(summary["heavy_heads"]["heads"], heavy);
    if (heavy > 0) {
      EXPECT_NEAR(summary["heavy_heads"]["output_error"], error / static_cast<double>(heavy), 1e-9);
      EXPECT_NE(out_.find("Plain means over the " + std::to_string(heavy)), std::string::npos);
    }
  }
  // What was scored holds more than the best of it.
  for (size_t head = 0; head < 4; ++head) {
    const json& best = result["results"][8 + head];
    const json& all = result["results"][12 + head];
    EXPECT_EQ(best["scan_fraction"], all["scan_fraction"]);
    EXPECT_GT(all["keys_attended"], best["keys_attended"]);
    EXPECT_GT(all["recovered_mass"], best["recovered_mass"]);
  }
}

TEST_F(CompareAttend, ASweepOfTheSearchBuildsOnce) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const SyntheticTrace trace = make_synthetic_trace({}, random_);
  const json sweep =
      compare(trace, {"--index", "ivf:C=12..16+4,probe=1..16*4", "--k", "10"})["results"];
  ASSERT_EQ(sweep.size(), 6U * 4);
  const char* specs[] = {"ivf:C=12,probe=1", "ivf:C=12,probe=4", "ivf:C=12,probe=16",
                         "ivf:C=16,probe=1", "ivf:C=16,probe=4", "ivf:C=16,probe=16"};
  for (size_t i = 0; i < 6; ++i) {
    const json alone = compare(trace, {"--index", specs[i], "--k", "10"})["results"];
    for (size_t head = 0; head < 4; ++head) {
      const json& row = sweep[4 * i + head];
      EXPECT_EQ(row["index"], specs[i]);
      for (const char* figure : {"params", "recall", "recovered_mass", "output_error",
                                 "scan_fraction", "keys_attended", "bytes_per_step"}) {
        EXPECT_EQ(row[figure], alone[head][figure]) << figure;
      }
      // Two builds would not take the same time to the nanosecond.
      EXPECT_EQ(row["build_s"], sweep[4 * (i / 3 * 3) + head]["build_s"]);
    }
  }
}

TEST_F(CompareAttend, DrawsALineForEachSweepAndWay) {
  const std::string path = folder_ / "curves.svg";
  (void)compare(make_synthetic_trace({}, random_),
                {"--index", "ivf:C=16,probe=1|4|16", "--index", "flat", "--attend", "topk",
                 "--attend", "scored", "--svg", path});
  const std::string svg = read_file(path);
  const auto count = [&](const std::string& part) {
    size_t n = 0;
    for (size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(svg.rfind("<svg ", 0), 0U);
  EXPECT_EQ(count("<svg "), count("</svg>"));
  EXPECT_EQ(count("<polyline "), 2U * 2);              // panels x sweeps; flat is a point
  EXPECT_EQ(count("<circle "), 2U * (2 * 3 + 2) + 4);  // and the legend
  EXPECT_EQ(count("<text "), count("</text>"));
  for (const char* part : {">ivf:C=16,probe=1|4|16, scored<", ">flat, topk:100<", "output error",
                           "offloaded keys and values", "median latency"}) {
    EXPECT_EQ(count(part) > 0, true) << part;
  }
  EXPECT_EQ(count("nan") + count("inf"), 0U);
}

}  // namespace
}  // namespace keyhole::tools
