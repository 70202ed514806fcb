#include <gtest/gtest.h>

#include "runtime/files/json.h"
#include "runtime/files/safetensors.h"
#include "tests/tools/cli/run_command.h"
#include "tests/tools/cli/synthetic_trace.h"

namespace keyhole::tools {
namespace {

class TrainSaap : public testing::Test {
 protected:
  std::string write(const std::string& name, uint32_t seed, uint32_t kv_heads = 2) {
    std::mt19937 random(seed);
    make_synthetic_trace({.kv_heads = kv_heads, .training = 60}, random).write(folder_ / name);
    return folder_ / name;
  }
  Outcome train(std::vector<std::string> args) {
    const std::vector<std::string> common = {
        "train-saap", "--out",   out_, "--centroids", "8", "--hidden", "64", "--epochs",
        "2",          "--batch", "32", "--sink",      "8", "--window", "16"};
    args.insert(args.begin(), common.begin(), common.end());
    return run_keyhole(args);
  }
  TemporaryFolder folder_;
  std::string out_ = folder_ / "classifiers.safetensors";
};

TEST_F(TrainSaap, WritesWhatCompareReads) {
  const std::string a = write("a", 1);
  const std::string b = write("b", 2);
  const std::string c = write("c", 3);
  const Outcome outcome = train({"--trace", a, b, "--validate", c});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_NE(outcome.out.find("4 heads"), std::string::npos) << outcome.out;
  EXPECT_EQ(SafetensorsFile(out_).tensors().size(), 4U * 7U);

  const std::string result = folder_ / "result.json";
  const Outcome compared =
      run_keyhole({"compare", "--trace", c, "--sink", "8", "--window", "16", "--classifiers", out_,
                   "--index", "saap:probe=8", "--index", "saap:probe=2", "--json", result});
  ASSERT_EQ(compared.exit_code, 0) << compared.err;
  const auto rows = nlohmann::json::parse(read_file(result))["results"];
  ASSERT_EQ(rows.size(), 8U);
  for (const auto& row : rows) {
    EXPECT_EQ(row["diagnostics"]["trained_partitions"], 1.0);
    const bool all = row["index"] == "saap:probe=8";
    EXPECT_EQ(row["scan_fraction"] == 1.0, all);
    if (all) {
      EXPECT_EQ(row["recall"], 1.0);
    }
  }
}

TEST_F(TrainSaap, OneTraceAloneLeavesNothingToValidate) {
  expect_failure(train({"--trace", write("a", 1)}), 2, "--validate");
}

TEST_F(TrainSaap, NumbersThatAreNoneAreRefused) {
  const std::string a = write("a", 1), b = write("b", 2);
  for (const std::string option : {"--lr", "--decay"}) {
    expect_failure(train({"--trace", a, "--trace", b, option, "nan"}), 2,
                   option + ": nan is no number");
  }
}

TEST_F(TrainSaap, TracesOfAnotherModelAreRefused) {
  expect_failure(train({"--trace", write("a", 1), write("b", 2, 1)}), 2, "another model");
}

TEST_F(TrainSaap, ABrokenClassifierFileEndsCompare) {
  const std::string trace = write("a", 1);
  expect_failure(run_keyhole({"compare", "--trace", trace, "--sink", "8", "--window", "16",
                              "--classifiers", trace, "--index", "saap"}),
                 1, "not a classifier file");
}

}  // namespace
}  // namespace keyhole::tools
