// What compare says of tails and targets, and how it sorts.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "tests/tools/cli/compare_fixture.h"

namespace keyhole::tools {
namespace {

class CompareBudget : public CompareFixture {
 protected:
  // Attention spread over many keys, where tails are worth something.
  SyntheticTrace trace() {
    SyntheticShape shape;
    shape.tokens = 1500;
    return make_synthetic_trace(shape, random_);
  }
};

TEST_F(CompareBudget, EveryAttendWithEveryTailAndTarget) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const json result =
      compare(trace(), {"--index", "ivf:C=24,probe=3", "--attend", "topk:20", "--attend", "scored",
                        "--tail", "none", "--tail", "second:8", "--tail", "centroid:32", "--target",
                        "none", "--target", "mass=0.9,max=400", "--per-head"});
  std::vector<std::string> ways;
  for (const json& row : result["summary"]) {
    ways.push_back(row["attend"].get<std::string>() + " " + row["tail"].get<std::string>() + " " +
                   row["target"].get<std::string>());
  }
  std::vector<std::string> expected;
  for (const char* attend : {"topk:20", "scored"}) {
    for (const char* tail : {"none", "second:8", "centroid:32"}) {
      for (const char* target : {"none", "mass=0.9,max=400"}) {
        expected.push_back(std::string(attend) + " " + tail + " " + target);
      }
    }
  }
  EXPECT_EQ(ways, expected);
  ASSERT_EQ(result["results"].size(), 4 * expected.size());
  for (const json& row : result["results"]) {
    const bool targeted = row["target"] != "none";
    const bool estimates = targeted || row["tail"] != "none";
    EXPECT_EQ(row["held"].is_null(), !targeted) << row;
    EXPECT_EQ(row["estimated_missing_mass"].is_null(), !estimates);
    EXPECT_EQ(row["keys_opened"].is_null(), !estimates);
    EXPECT_EQ(row["tail_bytes_per_key"] > 0, estimates);
    EXPECT_NEAR(row["missing_mass"].get<double>(), 1 - row["recovered_mass"].get<double>(), 1e-12);
    const auto offloaded = result["options"]["offloaded"].get<double>();
    EXPECT_NEAR(row["read_share"].get<double>(),
                row["bytes_per_step"].get<double>() / (offloaded * 2 * 64 * 4), 1e-9);
    if (!estimates) continue;
    EXPECT_LE(row["tail_bytes_per_step"], row["bytes_per_step"]);
    EXPECT_GE(row["estimated_missing_mass"], 0);
    EXPECT_LE(row["estimated_missing_mass"], 1);
    // A mean of differences is no less than the difference of means.
    EXPECT_GE(
        row["missing_mass_error"].get<double>() + 1e-9,
        std::abs(row["estimated_missing_mass"].get<double>() - row["missing_mass"].get<double>()));
  }
  // Partitions are those of the tail that is measured: smaller ones take more memory.
  EXPECT_GT(result["results"][8]["tail_bytes_per_key"],
            result["results"][16]["tail_bytes_per_key"]);
  for (const char* title : {"tail", "target", "missing", "estimated", "opened", "held"}) {
    EXPECT_NE(out_.find(title), std::string::npos) << title;
  }
}

TEST_F(CompareBudget, ATailMendsWhatWasNotRead) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const json rows = compare(trace(), {"--index", "ivf:C=24,probe=3", "--k", "10", "--tail", "none",
                                      "--tail", "second"})["results"];
  ASSERT_EQ(rows.size(), 8U);
  for (size_t head = 0; head < 4; ++head) {
    const json& none = rows[head];
    const json& second = rows[4 + head];
    EXPECT_EQ(none["tail"], "none");
    EXPECT_EQ(none["recovered_mass"], second["recovered_mass"]);
    EXPECT_EQ(none["recall"], second["recall"]);
    EXPECT_LT(second["output_error"], none["output_error"]);
  }
}

TEST_F(CompareBudget, HeldIsWhatTheQuantilesSay) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const SyntheticTrace data = trace();
  for (const double error : {0.02, 0.1, 0.3}) {
    const std::string target = "error=" + std::to_string(error).substr(0, 4);
    const json result = compare(data, {"--index", "ivf:C=24,probe=1", "--k", "5", "--tail",
                                       "second", "--target", target, "--target", "mass=0.5"});
    const auto samples = result["options"]["queries"].get<double>() * 2;  // heads of a group
    for (size_t head = 0; head < 4; ++head) {
      const json& row = result["results"][head];
      const double held = row["held"];
      EXPECT_NEAR(held * samples, std::round(held * samples), 1e-6);
      // p95 by nearest rank: at least 95 % of the samples are no larger.
      EXPECT_EQ(held >= 0.95 - 1e-9, row["output_error_p95"].get<double>() <= 1.5 * error) << row;
      EXPECT_EQ(held >= 0.5 - 1e-9, row["output_error_median"].get<double>() <= 1.5 * error) << row;
      // Where all are above, so is their mean.
      const json& mass = result["results"][4 + head];
      EXPECT_EQ(mass["target"], "mass=0.5");
      EXPECT_TRUE(mass["held"] < 1.0 || mass["recovered_mass"] >= 0.48) << mass;
    }
  }
}

TEST_F(CompareBudget, ATargetReadsUntilItIsMet) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const json rows = compare(trace(), {"--index", "ivf:C=24,probe=1", "--k", "5", "--target", "none",
                                      "--target", "mass=0.95,max=100000"})["results"];
  for (size_t head = 0; head < 4; ++head) {
    const json& none = rows[head];
    const json& asked = rows[4 + head];
    EXPECT_GE(asked["recovered_mass"], none["recovered_mass"]);
    // By the estimate of every step: nothing else ends it before all keys are read.
    EXPECT_LE(asked["estimated_missing_mass"], 0.05 + 1e-5);
    EXPECT_NEAR(asked["keys_attended"].get<double>(),
                none["keys_attended"].get<double>() + asked["keys_opened"].get<double>(), 1e-9);
    // What was read to meet the target counts as found.
    EXPECT_GE(asked["recall"], none["recall"]);
  }
}

TEST_F(CompareBudget, SortsTheSummary) {
  const SyntheticTrace data = trace();
  const std::vector<std::string> ways = {"--index",  "flat",   "--index",  "ivf:C=24,probe=1|8|24",
                                         "--attend", "topk:5", "--attend", "topk:50"};
  const auto sorted = [&](const char* by) {
    std::vector<std::string> args = ways;
    args.insert(args.end(), {"--sort", by});
    return compare(data, args)["summary"];
  };
  const auto rising = [](const json& rows, const auto& figure) {
    std::vector<double> values;
    for (const json& row : rows) values.push_back(figure(row));
    EXPECT_EQ(values.size(), 8U);
    return std::is_sorted(values.begin(), values.end());
  };
  EXPECT_TRUE(rising(sorted("error"), [](const json& r) { return r["output_error_median"]; }));
  EXPECT_TRUE(rising(sorted("bytes"), [](const json& r) { return r["bytes_per_step"]; }));
  EXPECT_TRUE(rising(sorted("us"), [](const json& r) { return r["latency_us"]["p50"]; }));
  EXPECT_EQ(sorted("none")[0]["index"], "flat");
}

TEST_F(CompareBudget, CsvHoldsThemAll) {
  const std::string csv = folder_ / "rows.csv";
  const json rows = compare(trace(), {"--index", "flat", "--k", "5", "--tail", "mean", "--target",
                                      "error=0.2,mass=0.5", "--csv", csv})["results"];
  std::istringstream lines(read_file(csv));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line.rfind("index,attend,tail,target,layer,kv_head,output_error_median,"
                       "output_error_p95,read_share,bytes_per_step,latency_us_p50,",
                       0),
            0U)
      << line;
  const auto commas = std::count(line.begin(), line.end(), ',');
  for (const json& row : rows) {
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_EQ(line.rfind("flat,topk:5,mean,\"error=0.2,mass=0.5\"," + row["layer"].dump() + "," +
                             row["kv_head"].dump() + ",",
                         0),
              0U)
        << line;
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), commas + 1);  // one in the target
  }
}

TEST_F(CompareBudget, RefusesWhatCannotBe) {
  const std::string path = write(trace());
  const auto refused = [&](std::vector<std::string> args, const std::string& part) {
    args.insert(args.begin(),
                {"compare", "--trace", path, "--index", "flat", "--sink", "16", "--window", "32"});
    expect_failure(run_keyhole(args), 2, part);
  };
  for (const char* tail : {"all", "none:4", "mean:3", "second:1025", "second:", "second:x"}) {
    refused({"--tail", tail}, "--tail " + std::string(tail));
  }
  refused({"--tail", "mean", "--tail", "mean"}, "twice");
  for (const char* target : {"x", "error", "error=0", "error=1", "mass=2", "max=5", "error=0.1,"}) {
    refused({"--target", target}, "--target " + std::string(target));
  }
  refused({"--sort", "recall"}, "--sort");
}

/// The host's choice has lists from 8,192 tokens on, a device's none.
TEST_F(CompareBudget, AutoIsTheChoiceOfAHost) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const json result = compare(trace(), {"--index", "auto", "--queries", "4"});
  EXPECT_EQ(result["results"][0]["index"], "codes:k=4,v=4,lists=64,from=8192");
  EXPECT_NE(out_.find("auto is codes:k=4,v=4,lists=64,from=8192"), std::string::npos) << out_;
}

/// A budget as its init function leaves it, 100 keys and no tail, is meant where it is asked for: more keys hold more.
TEST_F(CompareBudget, NoTailBesideCodesIsMeantForAnyNumberOfKeys) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const json rows =
      compare(trace(), {"--index", "codes", "--tail", "none", "--attend", "topk:99", "--attend",
                        "topk:100", "--attend", "topk:101", "--queries", "8"})["results"];
  ASSERT_EQ(rows.size(), 12U);
  for (size_t head = 0; head < 4; ++head) {
    const auto mass = [&](size_t way) {
      const json& row = rows[4 * way + head];
      EXPECT_EQ(row["tail"], "none");
      EXPECT_EQ(row["target"], "none");
      return row["recovered_mass"].get<double>();
    };
    EXPECT_LE(mass(0), mass(1));
    EXPECT_LE(mass(1), mass(2));
    EXPECT_LT(mass(2), 1.2 * mass(0));
  }
}

}  // namespace
}  // namespace keyhole::tools
