// What compare writes is what docs/compare.schema.json says.
#include <cstring>
#include <functional>

#include "tests/normal.h"
#include "tests/tools/cli/compare_fixture.h"
#include "tests/tools/cli/json_schema.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

class CompareSchema : public CompareFixture {
 protected:
  JsonSchema schema_{json::parse(read_file(KEYHOLE_DOCUMENTS "/compare.schema.json"))};
};

TEST_F(CompareSchema, DescribesEveryResult) {
  const SyntheticTrace trace = make_synthetic_trace({}, random_);
  const json full = compare(trace, {"--index",  "ivf:C=16,probe=1|4",
                                    "--index",  "flat",
                                    "--rival",  "random:budget=32",
                                    "--attend", "topk:20",
                                    "--tail",   "none",
                                    "--tail",   "second",
                                    "--target", "none",
                                    "--target", "error=0.2",
                                    "--goal",   "error=0.5",
                                    "--goal",   "memory=1GiB"});
  EXPECT_EQ(schema_.error_in(full), "");
  const json unreached = compare(trace, {"--index", "flat", "--goal", "latency=0.001us"});
  EXPECT_EQ(schema_.error_in(unreached), "");
  // Sets of vectors have no values, so that nothing is known of errors.
  const auto write_vectors = [&](const char* name, uint32_t rows) {
    constexpr uint32_t kDim = 64;
    std::string bytes(sizeof(float) * (2 + rows * kDim), '\0');
    const auto put = [&](size_t at, const auto& value) { std::memcpy(&bytes[4 * at], &value, 4); };
    put(0, rows);
    put(1, kDim);
    keyhole::test::Normal<float> normal;
    for (size_t i = 0; i < rows * kDim; ++i) put(2 + i, normal(random_));
    write_file(folder_ / name, bytes);
  };
  write_vectors("k.fbin", 500);
  write_vectors("q.fbin", 5);
  const json vectors = compare(folder_ / "k.fbin", {"--query-file", folder_ / "q.fbin", "--index",
                                                    "flat", "--goal", "latency=1s"});
  EXPECT_EQ(schema_.error_in(vectors), "");
  EXPECT_TRUE(vectors["summary"][0]["output_error_median"].is_null());
}

TEST_F(CompareSchema, SeesWhatIsNotDescribed) {
  const json good =
      compare(make_synthetic_trace({}, random_), {"--index", "flat", "--goal", "error=0.5"});
  ASSERT_EQ(schema_.error_in(good), "");
  const auto error = [&](const std::function<void(json&)>& change) {
    json bad = good;
    change(bad);
    return schema_.error_in(bad);
  };
  EXPECT_EQ(error([](json& d) { d["results"][1]["recall"] = "high"; }),
            "results[1].recall is \"high\", not \"number\"");
  EXPECT_EQ(error([](json& d) { d["results"][0].erase("held"); }), "results[0] lacks \"held\"");
  EXPECT_EQ(error([](json& d) { d["summary"][0]["speed"] = 1; }),
            "summary[0] has \"speed\", which is not described");
  EXPECT_EQ(error([](json& d) { d["summary"][0]["latency_us"]["p50"] = nullptr; }),
            "summary[0].latency_us.p50 is null, not \"number\"");
  EXPECT_EQ(error([](json& d) { d["version"] = 2; }), "version is 2, not 1");
  EXPECT_NE(error([](json& d) { d["advice"]["goals"][0]["of"] = "luck"; }), "");
  EXPECT_NE(error([](json& d) { d["summary"][0]["pareto"].push_back("luck"); }), "");
  EXPECT_NE(error([](json& d) { d["trace"]["tokens"] = -1; }), "");
  EXPECT_THROW((void)JsonSchema(json::object({{"pattern", "x"}})).error_in("x"),
               std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
