#include "tools/commands/common/run_file.h"

#include <gtest/gtest.h>

#include "tests/temporary_folder.h"

namespace keyhole::tools {
namespace {

class RunFiles : public testing::Test {
 protected:
  RunFile read(const std::string& text) {
    write_file(folder_ / "runs.json", text);
    return read_run_file(folder_ / "runs.json", kOptions);
  }
  static constexpr const char* kOptions[] = {"k", "sink", "queries", "kv-dtype", "layers"};
  static std::string head() { return R"({"format": "keyhole-runs", "version": 1, )"; }

  TemporaryFolder folder_;
};

TEST_F(RunFiles, BecomeSweepsAndOptions) {
  const RunFile file = read(head() + R"("comment": "what it is for",
    "trace": "kv.safetensors", "options": {"queries": 96, "kv_dtype": "f32", "layers": [1, 4]},
    "attend": "topk:20", "tail": ["none", "second"], "goals": ["error=0.05"],
    "runs": [{"index": "flat"},
             {"index": "ivf", "args": {"C": [16, 32]}, "query_args": {"probe": "1..4*2"}, "attend": ["scored"]},
             {"index": "roargraph:M=16", "query_args": {"ef": 32}, "target": ["error=0.1"]},
             {"rival": "hnswlib", "args": {"m": 8}}]})");
  EXPECT_EQ(file.trace, (folder_ / "kv.safetensors").string());
  EXPECT_EQ(file.arguments,
            (std::vector<std::string>{"--queries", "96", "--kv-dtype", "f32", "--layers", "1,4"}));
  EXPECT_EQ(file.goals, std::vector<std::string>{"error=0.05"});
  ASSERT_EQ(file.runs.size(), 4U);
  EXPECT_EQ(file.runs[0].spec, "flat");
  EXPECT_EQ(file.runs[0].budgets.attends, std::vector<std::string>{"topk:20"});
  EXPECT_EQ(file.runs[0].budgets.tails, (std::vector<std::string>{"none", "second"}));
  EXPECT_EQ(file.runs[1].spec, "ivf:C=16|32,probe=1..4*2");
  EXPECT_EQ(file.runs[1].budgets.attends, std::vector<std::string>{"scored"});
  EXPECT_EQ(file.runs[2].spec, "roargraph:M=16,ef=32");
  EXPECT_EQ(file.runs[2].budgets.targets, std::vector<std::string>{"error=0.1"});
  EXPECT_TRUE(file.runs[3].rival);
  EXPECT_EQ(file.runs[3].spec, "hnswlib:m=8");
}

TEST_F(RunFiles, SayWhatIsWrongWithThem) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"", "no JSON"},
      {"{\"format\": ", "no JSON"},
      {"[1]", "no JSON object"},
      {"{}", "\"format\" is null"},
      {R"({"format": "keyhole-runs", "version": 2})", "\"version\" is 2; allowed: 1"},
      {head() + R"("runs": []})", "\"runs\" is missing or empty"},
      {head() + R"("run": [{"index": "flat"}]})", "no field \"run\"; allowed: "},
      {head() + R"("runs": ["flat"]})", "runs[0] is \"flat\"; it is an object"},
      {head() + R"("runs": [{"args": {}}]})", "runs[0] names neither"},
      {head() + R"("runs": [{"index": "flat", "rival": "lsh"}]})", "runs[0] names both"},
      {head() + R"("runs": [{"index": "ivf", "query-args": {}}]})",
       "runs[0]: there is no field \"query-args\"; allowed: comment, index"},
      {head() + R"("runs": [{"index": "ivf", "args": {"C": true}}]})", "runs[0].args.C is true"},
      {head() + R"("runs": [{"index": "ivf", "args": {"C": []}}]})", "runs[0].args.C is empty"},
      {head() + R"("runs": [{"index": "ivf", "args": [1]}]})", "runs[0].args is [1]"},
      {head() + R"("runs": [{"index": "ivf", "attend": []}]})", "runs[0].attend is empty"},
      {head() + R"("runs": [{"rival": "lsh", "tail": ["none"]}]})", "\"tail\" is of indexes"},
      {head() + R"("options": {"json": "x"}, "runs": [{"index": "flat"}]})",
       "options: there is no \"json\"; allowed: k, sink"},
      {head() + R"("options": 3, "runs": [{"index": "flat"}]})", "\"options\" is 3"},
  };
  for (const auto& [text, part] : wrong) {
    const std::string error = error_of([&, &text = text] { (void)read(text); });
    EXPECT_NE(error.find(part), std::string::npos) << text << "\n" << error;
    EXPECT_NE(error.find("runs.json"), std::string::npos) << error;
  }
  EXPECT_NE(
      error_of([&] { (void)read_run_file(folder_ / "absent.json", kOptions); }).find("absent.json"),
      std::string::npos);
}

}  // namespace
}  // namespace keyhole::tools
