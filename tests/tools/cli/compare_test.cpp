#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <sstream>

#include "tests/tools/cli/compare_fixture.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class Compare : public CompareFixture {};

std::set<std::string> keys_of(const json& object) {
  std::set<std::string> out;
  for (const auto& [key, value] : object.items()) out.insert(key);
  return out;
}

double nearest_rank(std::vector<double> samples, double share) {
  std::sort(samples.begin(), samples.end());
  return samples[static_cast<size_t>(std::ceil(share * static_cast<double>(samples.size()))) - 1];
}

TEST_F(Compare, AutoIsWhatASessionWouldTake) {
  const std::string path = write(make_synthetic_trace({}, random_));
  const json chosen = compare(path, {"--index", "auto"});
  ASSERT_FALSE(chosen["results"].empty());
  const std::string index = chosen["results"][0]["index"];
  EXPECT_EQ(index.rfind("codes:", 0), 0U) << index;
  const json named = compare(path, {"--index", index});
  for (size_t i = 0; i < chosen["results"].size(); ++i) {
    for (const char* field : {"index", "tail", "output_error"}) {
      EXPECT_EQ(chosen["results"][i][field], named["results"][i][field]) << field;
    }
  }
  const Outcome text = run_keyhole({"compare", "--trace", path, "--index", "auto"});
  EXPECT_NE(text.out.find("auto is " + index), std::string::npos) << text.out << text.err;
}

TEST_F(Compare, ReportsWhatTheDefinitionsSay) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (const float softcap : {0.0F, 3.0F}) {
    SyntheticShape shape;
    shape.softcap = softcap;
    const SyntheticTrace trace = make_synthetic_trace(shape, random_);
    const std::string path = write(trace);
    for (const size_t k : {1, 10, 100000}) {
      const json result = compare(path, {"--index", "flat", "--k", std::to_string(k)});
      ASSERT_EQ(result["results"].size(), 4U);
      for (size_t head = 0; head < 4; ++head) {
        SCOPED_TRACE("softcap " + std::to_string(softcap) + ", k " + std::to_string(k) + ", head " +
                     std::to_string(head));
        const json& row = result["results"][head];
        EXPECT_EQ(row["layer"], head / 2 * 3 + 1);
        EXPECT_EQ(row["kv_head"], head % 2);
        const ExactSearch expected = exact_search(trace, head, k, kSink, kWindow);
        EXPECT_EQ(row["recall"], 1.0);
        EXPECT_EQ(row["scan_fraction"], 1.0);
        EXPECT_NEAR(row["middle_mass"], expected.middle_mass, 1e-5);
        EXPECT_NEAR(row["recovered_mass"], expected.recovered_mass, 1e-5);
        EXPECT_NEAR(row["keys_attended"], expected.keys_attended, 1e-9);
        const double mean = std::accumulate(expected.errors.begin(), expected.errors.end(), 0.0) /
                            static_cast<double>(expected.errors.size());
        EXPECT_NEAR(row["output_error"], mean, 1e-4);
        EXPECT_NEAR(row["output_error_median"], nearest_rank(expected.errors, 0.5), 1e-4);
        EXPECT_NEAR(row["output_error_p95"], nearest_rank(expected.errors, 0.95), 1e-4);
        if (k == 100000) {
          EXPECT_NEAR(row["recovered_mass"], 1, 1e-5);
          EXPECT_LT(row["output_error"], 1e-5);
        }
      }
    }
  }
}

TEST_F(Compare, WritesTheDocumentedJson) {
  const std::string path = write(make_synthetic_trace({}, random_));
  const json result = compare(path, {"--index", "flat", "--index", "ivf:C=8,probe=8", "--k", "10"});
  EXPECT_EQ(keys_of(result),
            (std::set<std::string>{"format", "version", "command", "machine", "trace", "options",
                                   "results", "summary", "advice"}));
  EXPECT_EQ(keys_of(result["machine"]),
            (std::set<std::string>{"cpu", "cores", "memory_bytes", "simd", "system", "keyhole"}));
  const std::set<std::string> figures = {"series",
                                         "index",
                                         "attend",
                                         "tail",
                                         "target",
                                         "params",
                                         "output_error_median",
                                         "output_error_p95",
                                         "read_share",
                                         "bytes_per_step",
                                         "latency_us",
                                         "missing_mass",
                                         "estimated_missing_mass",
                                         "missing_mass_error",
                                         "keys_opened",
                                         "held",
                                         "output_error",
                                         "recall",
                                         "recovered_mass",
                                         "scan_fraction",
                                         "keys_attended",
                                         "tail_bytes_per_step",
                                         "middle_mass",
                                         "build_s",
                                         "bytes_per_key",
                                         "tail_build_s",
                                         "tail_bytes_per_key",
                                         "memory_bytes_per_key",
                                         "sparsity"};
  std::set<std::string> row_keys = figures;
  row_keys.insert({"layer", "kv_head", "diagnostics"});
  std::set<std::string> summary_keys = figures;
  summary_keys.insert({"heads", "build_s_total", "heavy_heads", "pareto"});
  EXPECT_EQ(result["trace"]["tokens"], 600);
  EXPECT_EQ(result["trace"]["first_query_position"], 582);
  EXPECT_EQ(result["options"]["offloaded"], 582 + 1 - kWindow - kSink);
  EXPECT_EQ(result["options"]["k"], 10);

  ASSERT_EQ(result["results"].size(), 8U);
  for (const json& row : result["results"]) {
    EXPECT_EQ(keys_of(row), row_keys);
    const json& latency = row["latency_us"];
    EXPECT_EQ(keys_of(latency), (std::set<std::string>{"p50", "p95", "p99"}));
    EXPECT_GT(latency["p50"], 0);
    EXPECT_LE(latency["p50"], latency["p95"]);
    EXPECT_LE(latency["p95"], latency["p99"]);
    EXPECT_GE(row["build_s"], 0);
    EXPECT_GE(row["bytes_per_key"], 0);
    EXPECT_TRUE(row["diagnostics"].is_object());
    EXPECT_EQ(row["params"].get<std::string>().substr(0, 3),
              row["index"].get<std::string>().substr(0, 3));
  }
  ASSERT_EQ(result["summary"].size(), 2U);
  EXPECT_EQ(result["summary"][0]["index"], "flat");
  EXPECT_EQ(result["summary"][1]["index"], "ivf:C=8,probe=8");
  for (const json& row : result["summary"]) {
    EXPECT_EQ(keys_of(row), summary_keys);
    EXPECT_EQ(row["heads"], 4);
  }
}

TEST_F(Compare, WeighsTheSummaryByMiddleMass) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const std::string path = write(make_synthetic_trace({}, random_));
  const json result = compare(path, {"--index", "ivf:C=16,probe=2", "--k", "10"});
  const auto weighted = [&](auto&& figure) {
    double sum = 0;
    double weights = 0;
    for (const json& row : result["results"]) {
      sum += row["middle_mass"].get<double>() * figure(row).template get<double>();
      weights += row["middle_mass"].get<double>();
    }
    return sum / weights;
  };
  const json& summary = result["summary"][0];
  for (const char* name : {"recall", "recovered_mass", "output_error", "scan_fraction", "build_s",
                           "bytes_per_key", "middle_mass"}) {
    EXPECT_NEAR(summary[name], weighted([&](const json& row) { return row[name]; }), 1e-9) << name;
  }
  for (const char* name : {"p50", "p95", "p99"}) {
    EXPECT_NEAR(summary["latency_us"][name],
                weighted([&](const json& row) { return row["latency_us"][name]; }), 1e-6)
        << name;
  }
}

TEST_F(Compare, AnApproximateIndexIsMeasuredAgainstTheTruth) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  const std::string path = write(make_synthetic_trace({}, random_));
  const json result =
      compare(path, {"--index", "ivf:C=16,probe=1", "--index", "ivf:C=16,probe=16", "--k", "20"});
  for (size_t head = 0; head < 4; ++head) {
    const json& few = result["results"][head];
    const json& all = result["results"][4 + head];
    EXPECT_LT(few["recall"], 0.9);
    EXPECT_GT(few["recall"], 0);
    EXPECT_LT(few["scan_fraction"], 0.6);
    EXPECT_LT(few["recovered_mass"], all["recovered_mass"]);
    EXPECT_GE(few["recovered_mass"].get<double>() + 1e-6, 1 - few["middle_mass"].get<double>());
    EXPECT_GT(few["output_error"], all["output_error"]);
    EXPECT_EQ(all["recall"], 1.0);
  }
}

TEST_F(Compare, TiesCount) {
  // Few keys: a graph over equal ones compares every new key with all others.
  SyntheticShape shape;
  shape.layers = shape.kv_heads = 1;
  shape.tokens = 150;
  SyntheticTrace trace = make_synthetic_trace(shape, random_);
  // All offloaded keys alike: whichever k of them come back, they are as good as any others.
  const auto offloaded_end =
      static_cast<ptrdiff_t>(trace.options.query_positions.front()) + 1 - ptrdiff_t{kWindow};
  const auto row = [&](ptrdiff_t token) { return trace.keys[0].begin() + token * shape.dim; };
  for (ptrdiff_t token = kSink + 1; token < offloaded_end; ++token) {
    std::copy_n(row(kSink), shape.dim, row(token));
  }
  const json result = compare(write(trace), {"--index", "hnsw", "--index", "flat", "--k", "5"});
  ASSERT_EQ(result["results"].size(), 2U);
  for (const json& figures : result["results"]) EXPECT_EQ(figures["recall"], 1.0) << figures;
}

TEST_F(Compare, RoundedKeysTieWithinTheirRounding) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  SyntheticShape shape;
  shape.tokens = 2000;
  const std::string path = write(make_synthetic_trace(shape, random_));
  for (const char* dtype : {"f16", "bf16"}) {
    const std::string out = folder_ / "rounded.json";
    const Outcome outcome = run_keyhole(
        {"compare", "--trace", path, "--index", "flat", "--kv-dtype", dtype, "--json", out});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const json result = json::parse(read_file(out));
    ASSERT_EQ(result["results"].size(), 4U);
    for (const json& row : result["results"]) {
      EXPECT_GT(row["recall"], 0.995) << dtype;
      EXPECT_LT(row["recall"].get<double>(), 1.0 + 1e-12);
    }
  }
}

TEST_F(Compare, MeasuresTheChosenHeadsAndQueries) {
  const std::string path = write(make_synthetic_trace({}, random_));
  const json result = compare(path, {"--index", "flat", "--layers", "4", "--heads", "0,1",
                                     "--queries", "3", "--threads", "1"});
  ASSERT_EQ(result["results"].size(), 2U);
  for (const json& row : result["results"]) EXPECT_EQ(row["layer"], 4);
  EXPECT_EQ(result["options"]["queries"], 3);
  EXPECT_EQ(result["options"]["builds_at_once"], 1);
}

TEST_F(Compare, AnswersAlikeForAnyNumberOfThreads) {
  const std::string path = write(make_synthetic_trace({}, random_));
  json results[2];
  for (size_t i = 0; i < 2; ++i) {
    results[i] = compare(path, {"--index", "flat", "--index", "ivf:C=16,probe=2", "--k", "10",
                                "--threads", i == 0 ? "1" : "5"})["results"];
    for (json& row : results[i]) {
      row.erase("latency_us");
      row.erase("build_s");
    }
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(Compare, WritesCsvAndJsonToStandardOutput) {
  const std::string path = write(make_synthetic_trace({}, random_));
  const std::string csv = folder_ / "rows.csv";
  const Outcome outcome =
      run_keyhole({"compare", "--trace", path, "--index", "ivf:C=8,probe=2", "--sink", "16",
                   "--window", "32", "--json", "-", "--csv", csv});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json rows = json::parse(outcome.out)["results"];  // nothing but JSON
  std::istringstream lines(read_file(csv));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line.rfind("index,attend,tail,target,layer,kv_head,", 0), 0U) << line;
  for (const json& row : rows) {
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_EQ(line.rfind("\"ivf:C=8,probe=2\",topk:100,none,none," + row["layer"].dump() + "," +
                             row["kv_head"].dump() + ",",
                         0),
              0U)
        << line;
  }
  EXPECT_FALSE(std::getline(lines, line));
}

TEST_F(Compare, PrintsASummaryAndOnRequestEveryHead) {
  const std::string path = write(make_synthetic_trace({}, random_));
  const std::vector<std::string> args = {"compare", "--trace", path, "--index",  "flat", "--k",
                                         "7",       "--sink",  "16", "--window", "32"};
  const Outcome summary = run_keyhole(args);
  EXPECT_EQ(summary.exit_code, 0) << summary.err;
  EXPECT_NE(summary.out.find("bytes/key"), std::string::npos) << summary.out;
  EXPECT_NE(summary.out.find("recall@7"), std::string::npos) << summary.out;
  EXPECT_EQ(summary.out.find("  KV head  middle"), std::string::npos) << summary.out;
  std::vector<std::string> more = args;
  more.emplace_back("--per-head");
  const Outcome heads = run_keyhole(more);
  EXPECT_NE(heads.out.find("  KV head  middle"), std::string::npos) << heads.out;
}

TEST_F(Compare, RefusesWhatCannotBe) {
  const std::string path = write(make_synthetic_trace({}, random_));
  const auto refused = [&](int exit_code, std::vector<std::string> args, const std::string& part) {
    args.insert(args.begin(), "compare");
    const Outcome outcome = run_keyhole(args);
    expect_failure(outcome, exit_code, part);
    EXPECT_EQ(outcome.err.rfind("keyhole: error: ", 0), 0U) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  };
  refused(2, {"--trace", path}, "--index");
  refused(2, {"--index", "flat"}, "--trace");
  for (const char* type : {"flat", "ivf", "hnsw"}) {
    refused(2, {"--trace", path, "--index", "annoy", "--sink", "16", "--window", "32"}, type);
  }
  refused(2, {"--trace", path, "--index", "ivf:leaves=3", "--sink", "16", "--window", "32"},
          "leaves");
  refused(2, {"--trace", path, "--index", "flat", "--sink", "500", "--window", "83"},
          "cover all 583");
  refused(2, {"--trace", path, "--index", "flat", "--sink", "4294967295", "--window", "4294967295"},
          "cover all");
  refused(2, {"--trace", path, "--index", "flat", "--index", "flat"}, "twice");
  refused(2, {"--trace", path, "--index", "ivf:probe=2|4", "--index", "ivf:probe=4"}, "twice");
  refused(2, {"--trace", path, "--index", "ivf:probe=2|four", "--sink", "16", "--window", "32"},
          "probe=four");
  refused(2, {"--trace", path, "--index", "ivf:probe=16..8*2"}, "probe=16..8*2: 16 is above 8");
  for (const char* attend :
       {"all", "topk:0", "topk:x", "scored:1", "weight", "weight:0", "weight:1"}) {
    refused(2, {"--trace", path, "--index", "flat", "--attend", attend}, "weight:EPS");
  }
  refused(2, {"--trace", path, "--index", "flat", "--attend", "topk", "--attend", "topk:100"},
          "--attend topk:100 is given twice");
  refused(2, {"--trace", path, "--index", "flat", "--svg", "-"}, "--svg");
  refused(2, {"--trace", path, "--index", "flat", "--goal", "speed=1"}, "no goal 'speed'");
  refused(
      2,
      {"--trace", path, "--rival", "random", "--sink", "16", "--window", "32", "--goal", "error=1"},
      "give --index");
  refused(2, {"--trace", path, "--index", "flat", "--layers", "2"}, "which has 1, 4");
  refused(2, {"--trace", path, "--index", "flat", "--heads", "2"}, "0..1");
  refused(2, {"--trace", path, "--index", "flat", "--k", "0"}, "--k");
  refused(2, {"--trace", path, "--index", "flat", "--kv-dtype", "int4"}, "f16");
  refused(2, {"--trace", path, "--index", "flat", "--query-file", "q.fbin"}, "--query-file");
  refused(1, {"--trace", folder_ / "absent.safetensors", "--index", "flat"}, "No such file");
  write_file(folder_ / "bad.safetensors", std::string("not a trace"));
  refused(1, {"--trace", folder_ / "bad.safetensors", "--index", "flat"}, "bad.safetensors");
  refused(2, {"--trace", path, "--index", "flat", "--json", "-", "--csv", "-"}, "standard output");
  refused(1,
          {"--trace", path, "--index", "flat", "--sink", "16", "--window", "32", "--json",
           "/nonexistent/x.json", "--csv", "-"},
          "/nonexistent/x.json");
}

}  // namespace
}  // namespace keyhole::tools
