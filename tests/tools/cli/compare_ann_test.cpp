// Results in the files of ann-benchmarks and VIBE: ours going out, others' coming in.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "tests/normal.h"
#include "tests/tools/cli/compare_fixture.h"
#include "tools/io/ann_result.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

#ifdef KEYHOLE_HDF5

class CompareAnn : public CompareFixture {
 protected:
  static constexpr size_t kDim = 64, kKeys = 300, kQueries = 12, kBest = 10;

  void SetUp() override {
    keyhole::test::Normal<float> normal;
    for (size_t i = 0; i < kKeys * kDim; ++i) keys_.push_back(normal(random_));
    for (size_t i = 0; i < kQueries * kDim; ++i) queries_.push_back(normal(random_));
    write_fbin("set.fbin", keys_);
    write_fbin("q.fbin", queries_);
  }
  void write_fbin(const char* name, const std::vector<float>& rows) const {
    const uint32_t header[] = {static_cast<uint32_t>(rows.size() / kDim), kDim};
    std::string bytes(sizeof header + rows.size() * sizeof(float), '\0');
    std::memcpy(bytes.data(), header, sizeof header);
    std::memcpy(bytes.data() + sizeof header, rows.data(), rows.size() * sizeof(float));
    write_file(folder_ / name, bytes);
  }
  [[nodiscard]] double product(size_t query, size_t key) const {
    double sum = 0;
    for (size_t i = 0; i < kDim; ++i) {
      sum += double{queries_[query * kDim + i]} * keys_[key * kDim + i];
    }
    return sum;
  }
  /// Keys by falling inner product.
  [[nodiscard]] std::vector<int64_t> ranking(size_t query) const {
    std::vector<int64_t> ids(kKeys);
    std::iota(ids.begin(), ids.end(), 0);
    std::sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) {
      return product(query, static_cast<size_t>(a)) > product(query, static_cast<size_t>(b));
    });
    return ids;
  }
  /// Another system's answers: of each query the `good` best, then the worst of all.
  [[nodiscard]] AnnResult someone(size_t good) const {
    AnnResult r;
    r.algo = "annoy";
    r.name = "Annoy(" + std::to_string(good) + ")";
    r.dataset = "set";
    r.distance = "ip";
    r.build_seconds = 7;
    r.index_kib = 300;
    r.count = kBest;
    for (size_t q = 0; q < kQueries; ++q) {
      const std::vector<int64_t> ids = ranking(q);
      for (size_t i = 0; i < kBest; ++i) {
        r.neighbours.push_back(i < good ? ids[i] : ids[kKeys - 1 - i]);
        r.distances.push_back(
            static_cast<float>(-product(q, static_cast<size_t>(r.neighbours.back()))));
      }
      r.seconds.push_back(1e-6 * static_cast<double>(q + 1));
    }
    return r;
  }
  json compare_set(std::vector<std::string> args) {
    const std::string out = folder_ / "result.json";
    args.insert(args.begin(),
                {"compare", "--trace", folder_ / "set.fbin", "--query-file", folder_ / "q.fbin",
                 "--k", std::to_string(kBest), "--kv-dtype", "f32", "--json", out});
    const Outcome outcome = run_keyhole(args);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    out_ = outcome.out;
    return json::parse(read_file(out));
  }
  void refused(std::vector<std::string> args, const std::string& part) const {
    const std::vector<std::string> common = {
        "compare", "--trace", folder_ / "set.fbin", "--query-file", folder_ / "q.fbin",
        "--index", "flat"};
    args.insert(args.begin(), common.begin(), common.end());
    const Outcome outcome = run_keyhole(args);
    expect_failure(outcome, 2, part);
    EXPECT_EQ(outcome.out, "");
  }

  std::vector<float> keys_, queries_;
};

TEST_F(CompareAnn, WritesWhatEveryWayAnswered) {
  for (const char* layout : {"ann-benchmarks", "vibe"}) {
    const std::string out = folder_ / layout;
    const json document =
        compare_set({"--index", "flat", "--index", "ivf:C=8,probe=1|8", "--rival",
                     "random:budget=32", "--ann-hdf5", out, "--ann-layout", layout});
    size_t files = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(out)) {
      if (!entry.is_regular_file()) continue;
      ++files;
      EXPECT_EQ(entry.path().parent_path().parent_path(), folder_ / layout / "set" / "10");
      const std::vector<AnnResult> results = read_ann_results(entry.path());
      ASSERT_EQ(results.size(), 1U);
      const AnnResult& r = results[0];
      EXPECT_EQ(r.group.empty(), std::string("ann-benchmarks") == layout);
      EXPECT_EQ(entry.path().parent_path().filename(), r.algo);
      EXPECT_EQ(r.dataset, "set");
      ASSERT_EQ(r.rows(), kQueries);
      ASSERT_EQ(r.count, kBest);
      EXPECT_TRUE(r.queries.empty()) << "all of them";
      const json* row = nullptr;
      for (const json& one : document["results"]) {
        const std::string name = one["index"].get<std::string>() + " attend=";
        if (r.name.rfind(name, 0) == 0) row = &one;
      }
      ASSERT_NE(row, nullptr) << r.name;
      EXPECT_NEAR(r.build_seconds, (*row)["build_s"].get<double>(), 1e-12);
      EXPECT_NEAR(r.index_kib * 1024, (*row)["bytes_per_key"].get<double>() * kKeys, 1e-6);
      std::vector<double> us;
      size_t hits = 0;
      for (size_t q = 0; q < kQueries; ++q) {
        us.push_back(1e6 * r.seconds[q]);
        const std::vector<int64_t> best = ranking(q);
        for (size_t i = 0; i < kBest; ++i) {
          const int64_t id = r.neighbours[q * kBest + i];
          const float distance = r.distances[q * kBest + i];
          if (id < 0) {
            EXPECT_EQ(distance, INFINITY);
            continue;
          }
          EXPECT_NEAR(distance, -product(q, static_cast<size_t>(id)), 1e-4);
          if (i > 0) {
            EXPECT_LE(r.distances[q * kBest + i - 1], distance) << "the best first";
          }
          hits += static_cast<size_t>(std::count(best.begin(), best.begin() + kBest, id));
        }
      }
      EXPECT_NEAR(static_cast<double>(hits) / (kQueries * kBest), (*row)["recall"].get<double>(),
                  1e-9);
      std::sort(us.begin(), us.end());
      EXPECT_NEAR(us[kQueries / 2 - 1], (*row)["latency_us"]["p50"].get<double>(), 1e-6);
    }
    EXPECT_EQ(files, 4U);
    // What went out comes in again: the same recall, mass and times.
    const json back = compare_set({"--ann-results", out});
    ASSERT_EQ(back["results"].size(), 4U);
    for (const json& row : back["results"]) {
      size_t found = 0;
      for (const json& own : document["results"]) {
        const std::string name = ": " + own["index"].get<std::string>() + " attend=";
        if (row["index"].get<std::string>().find(name) == std::string::npos) continue;
        ++found;
        EXPECT_EQ(row["recall"], own["recall"]);
        if (own["attend"] == "topk:10") {
          EXPECT_NEAR(row["recovered_mass"], own["recovered_mass"], 1e-9);
        }
        EXPECT_NEAR(row["latency_us"]["p50"], own["latency_us"]["p50"], 1e-6);
      }
      EXPECT_EQ(found, 1U) << row["index"];
    }
  }
}

TEST_F(CompareAnn, OfGroupsAndOfSomeQueriesItKeepsWhichTheyAre) {
  SyntheticShape shape;
  shape.queries = 9;
  const std::string trace = write(make_synthetic_trace(shape, random_));
  const std::string out = folder_ / "results";
  const std::vector<std::string> common = {"--k", "20", "--queries", "4"};
  std::vector<std::string> args = common;
  args.insert(args.end(), {"--index", "ivf:C=16,probe=2", "--ann-hdf5", out});
  const json own = compare(trace, args);
  args = common;
  args.insert(args.end(), {"--index", "flat", "--ann-results", out});
  const json back = compare(trace, args);
  ASSERT_EQ(own["results"].size(), 4U);
  ASSERT_EQ(back["results"].size(), 8U);
  for (size_t i = 0; i < 4; ++i) {
    const json& row = back["results"][4 + i];
    EXPECT_EQ(row["layer"], own["results"][i]["layer"]);
    EXPECT_EQ(row["kv_head"], own["results"][i]["kv_head"]);
    EXPECT_NEAR(row["recall"], own["results"][i]["recall"], 1e-9);
    EXPECT_NEAR(row["latency_us"]["p50"], own["results"][i]["latency_us"]["p50"], 1e-6);
    // Each head attends its own neighbours, and not the union of the group.
    EXPECT_LE(row["recovered_mass"], own["results"][i]["recovered_mass"]);
    EXPECT_GT(row["output_error"], 0);
    EXPECT_TRUE(row["bytes_per_step"].is_null());
  }
  // More queries than it holds.
  expect_failure(run_keyhole({"compare", "--trace", trace, "--sink", "16", "--window", "32", "--k",
                              "20", "--index", "flat", "--ann-results", out}),
                 2, "holds no answer to query");
}

TEST_F(CompareAnn, ShowsOthersBesideItsOwn) {
  const std::string results = folder_ / "results";
  std::filesystem::create_directories(results);
  for (const size_t good : {4U, 10U}) {
    write_ann_result(results + "/" + std::to_string(good) + ".hdf5", someone(good));
  }
  AnnResult group = someone(7);
  group.group = "7";
  group.build_seconds = AnnResult::kUnknown;
  write_ann_result(results + "/vibe.h5", group);
  const std::string page = folder_ / "page.html", csv = folder_ / "rows.csv",
                    ann = folder_ / "ann.csv", svg = folder_ / "c.svg";
  const json document =
      compare_set({"--index", "flat", "--ann-results", results, "--sort", "bytes", "--per-head",
                   "--html", page, "--csv", csv, "--ann-csv", ann, "--svg", svg});
  ASSERT_EQ(document["results"].size(), 4U);
  const auto row = [&](const std::string& index) {
    for (const json& one : document["summary"]) {
      if (one["index"] == index) return one;
    }
    ADD_FAILURE() << "no row " << index;
    return json();
  };
  EXPECT_DOUBLE_EQ(row("annoy: Annoy(4)")["recall"], 0.4);
  EXPECT_DOUBLE_EQ(row("annoy: Annoy(10)")["recall"], 1.0);
  const json& seven = row("annoy: Annoy(7) 7");
  EXPECT_DOUBLE_EQ(seven["recall"], 0.7);
  EXPECT_TRUE(seven["build_s"].is_null());
  EXPECT_TRUE(seven["build_s_total"].is_null());
  const json best = row("annoy: Annoy(10)");
  EXPECT_NEAR(best["recovered_mass"], row("flat")["recovered_mass"], 1e-9);
  EXPECT_EQ(best["series"], "annoy");
  EXPECT_EQ(best["attend"], "topk:10");
  EXPECT_NEAR(best["latency_us"]["p50"], 6, 1e-9);
  EXPECT_EQ(best["build_s"], 7);
  EXPECT_NEAR(best["bytes_per_key"], 300.0 * 1024 / kKeys, 1e-9);
  for (const char* field : {"bytes_per_step", "read_share", "scan_fraction"}) {
    EXPECT_TRUE(best[field].is_null()) << field;
  }
  // Nobody knows what it read: it is beaten in time and memory or not, and never first in bytes.
  const json& fronts = best["pareto"];
  EXPECT_EQ(std::count(fronts.begin(), fronts.end(), "bytes"), 0);
  EXPECT_EQ(document["summary"][0]["index"], "flat") << "sorted by bytes";
  for (const std::string& text :
       {out_, read_file(page), read_file(csv), read_file(ann), read_file(svg)}) {
    EXPECT_EQ(text.find("nan"), std::string::npos) << text.substr(0, 2000);
    EXPECT_NE(text.find("annoy"), std::string::npos);
  }
  EXPECT_NE(read_file(page).find("are results of files"), std::string::npos);
}

TEST_F(CompareAnn, RefusesResultsOverSomethingElse) {
  const std::string path = folder_ / "r.hdf5";
  const auto with = [&](const std::function<void(AnnResult&)>& change) {
    AnnResult r = someone(10);
    change(r);
    write_ann_result(path, r);
  };
  const auto bad = [&](const std::string& part, const std::function<void(AnnResult&)>& change) {
    with(change);
    refused({"--k", "10", "--ann-results", path}, part);
  };
  bad("of the data set glove", [](AnnResult& r) { r.dataset = "glove"; });
  bad("do its ids begin at 1?", [](AnnResult& r) {
    for (int64_t& id : r.neighbours) id = (id + 1) % static_cast<int64_t>(kKeys);
  });
  bad("has the neighbour 300; allowed: 0..299", [](AnnResult& r) {
    r.distances.clear();
    r.distances.assign(r.neighbours.size(), 0);
    r.distance.clear();
    r.neighbours[5] = 300;
  });
  bad("has 11 queries, and the data set has 12", [](AnnResult& r) {
    r.seconds.pop_back();
    r.neighbours.resize(11 * kBest);
    r.distances.resize(11 * kBest);
  });
  bad("\"euclidean\", and these keys have lengths from",
      [](AnnResult& r) { r.distance = "euclidean"; });
  bad("\"hamming\", and attention is by inner products",
      [](AnnResult& r) { r.distance = "hamming"; });
  with([](AnnResult&) {});
  refused({"--k", "20", "--ann-results", path}, "give --k 10 or less");
  refused({"--k", "10", "--ann-results", path, "--ann-results", path}, "is in " + path + " too");
  std::filesystem::create_directories(folder_ / "empty");
  refused({"--ann-results", folder_ / "empty"}, "holds no .hdf5");
  expect_failure(
      run_keyhole({"compare", "--trace", folder_ / "set.fbin", "--query-file", folder_ / "q.fbin",
                   "--index", "flat", "--ann-results", folder_ / "absent.hdf5"}),
      1, "absent.hdf5: cannot be opened as HDF5");
}

TEST_F(CompareAnn, ASweepThatGoesOnWritesTheFilesThatAreMissing) {
  const std::string out = folder_ / "results";
  const std::vector<std::string> args = {"--index",           "flat",     "--index",
                                         "ivf:C=8,probe=1|8", "--resume", folder_ / "rows.jsonl"};
  const json first = compare_set(args);
  std::vector<std::string> with_files = args;
  with_files.insert(with_files.end(), {"--ann-hdf5", out});
  const json second = compare_set(with_files);
  EXPECT_EQ(second["results"], first["results"]) << "rows that are known stay as they are";
  const auto count = [&] {
    size_t files = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(out)) {
      files += entry.is_regular_file() ? 1 : 0;
    }
    return files;
  };
  EXPECT_EQ(count(), 3U);
  const auto flat = folder_ / "results" / "set" / "10" / "keyhole-flat";
  ASSERT_TRUE(std::filesystem::exists(flat));
  std::filesystem::remove_all(flat);
  (void)compare_set(with_files);
  EXPECT_EQ(count(), 3U);
}

#else

TEST_F(CompareFixture, AnnFilesNeedHdf5) {
  expect_failure(run_keyhole({"compare", "--trace", write(make_synthetic_trace({}, random_)),
                              "--index", "flat", "--ann-hdf5", folder_ / "results"}),
                 1, "built without HDF5");
}

#endif

}  // namespace
}  // namespace keyhole::tools
