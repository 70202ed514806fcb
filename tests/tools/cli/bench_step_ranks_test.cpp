// bench-step --parallel without mpirun: one rank, and what is refused. Several: bench_step_under_mpirun.
#include <gtest/gtest.h>

#include "runtime/files/json.h"
#include "tests/tools/cli/run_command.h"
#include "tools/mpi/ranks.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

Outcome bench_ranks(const std::vector<std::string>& more) {
  std::vector<std::string> args = {
      "bench-step", "--synthetic", "--layers", "2",         "--q-heads", "4",        "--kv-heads",
      "2",          "--head-dim",  "64",       "--context", "2k",        "--steps",  "4",
      "--warmup",   "2",           "--sink",   "16",        "--window",  "64",       "--threads",
      "2",          "--device",    "host",     "--index",   "flat",      "--attend", "topk:4096"};
  args.insert(args.end(), more.begin(), more.end());
  // A process that nobody started as one of several needs no network. Open MPI leaves memory behind at its end.
  return run_keyhole(args, {{"OMPI_MCA_btl", "self,vader"}, {"LSAN_OPTIONS", "detect_leaks=0"}});
}

void expect_ranks_refused(const std::vector<std::string>& args, const std::string& text) {
  const Outcome outcome = bench_ranks(args);
  expect_failure(outcome, 2, text);
  EXPECT_EQ(outcome.out, "");
}

TEST(BenchStepRanks, RefusesWhatRanksCannotDo) {
  expect_ranks_refused({"--parallel", "rows"}, "--parallel");
  expect_ranks_refused({"--parallel", "tensor", "--graph"}, "--graph with --parallel tensor");
  expect_ranks_refused({"--parallel", "context", "--weights"}, "--weights with --parallel context");
  expect_ranks_refused({"--parallel", "context", "--index", "ivf:rope=undo"}, "RoPE");
}

TEST(BenchStepRanks, WithoutMpiItSaysWhatToInstall) {
  if (has_mpi()) GTEST_SKIP() << "this build has MPI";
  expect_failure(bench_ranks({"--parallel", "tensor"}), 1, "install libopenmpi-dev");
}

TEST(BenchStepRanks, OneRankIsNamedInTheResult) {
  if (!has_mpi()) GTEST_SKIP() << "this build has no MPI";
  const std::string kinds[] = {"context", "tensor"};
  for (const std::string& kind : kinds) {
    const Outcome outcome = bench_ranks({"--parallel", kind, "--compare", "full", "--json", "-"});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const json out = json::parse(outcome.out);
    EXPECT_EQ(out["options"]["parallel"], kind);
    EXPECT_EQ(out["options"]["ranks"], 1);
    EXPECT_EQ(out["options"]["context_block"], kind == "context" ? 4096 : 0);
    const json& first = out["results"][0];
    // All keys are attended: what is left is the rounding to fp16.
    EXPECT_GT(first["written_error"]["p50"], 0);
    EXPECT_LT(first["written_error"]["p99"], 1e-3);
    ASSERT_EQ(first["rank_bytes"].size(), 1U);
    EXPECT_EQ(first["rank_bytes"][0]["host"], first["statistics"]["host_bytes"]);
    EXPECT_EQ(first["audit"].is_null(), kind == "context");
    EXPECT_NE(out["results"][1]["note"].get<std::string>().find("of each of 1 ranks"),
              std::string::npos);
  }
}

TEST(BenchStepRanks, OneProcessNamesNone) {
  const Outcome outcome = bench_ranks({"--json", "-"});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const json out = json::parse(outcome.out);
  EXPECT_EQ(out["options"]["parallel"], nullptr);
  EXPECT_EQ(out["options"]["ranks"], 1);
  EXPECT_EQ(out["results"][0]["rank_bytes"], nullptr);
  EXPECT_EQ(out["results"][0]["written_error"], nullptr);
}

}  // namespace
}  // namespace keyhole::tools
