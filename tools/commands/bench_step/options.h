// The command line of bench-step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tools/commands/bench_step/head_source.h"
#include "tools/commands/bench_step/plan.h"
#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/parallel.h"
#include "tools/commands/common/run_file.h"

namespace keyhole::tools {

struct BenchStepOptions {
  StepShape shape;
  std::string context = "128k";
  std::string trace;
  bool synthetic = false;
  std::string turn = "permute";
  std::vector<std::string> indexes;
  BudgetLists budgets;
  std::string runs;
  std::vector<RunFile::Run> groups;  ///< of the run file, by resolve_runs()
  std::vector<SettingValue> settings;
  uint32_t k = 100;
  uint32_t sink = 128, window = 512;
  uint32_t steps = 32, warmup = 8, audit_steps = 8, training = 4096;
  std::string device = "auto", signal = "auto", kv_host = "same";
  uint32_t ordinal = 0, threads = 0, busy = 0;
  bool weights = false, blocking = false, graph = false;
  std::string device_cap, host_cap, pinned_cap;
  std::vector<std::string> compare;
  ParallelFlags parallel;
  uint64_t seed = 1;
  std::string json, svg, html;
};

void add_bench_step_options(CLI::App& command, BenchStepOptions& options);

/// Joins the command line and its --runs: takes the file's trace and options where the command line has none, and
/// puts its indexes with their budgets into `groups`, before those of --index. Throws UsageError.
[[nodiscard]] BenchStepOptions resolve_runs(const CLI::App& command, BenchStepOptions given);

/// Turns the options into numbers. Throws UsageError.
[[nodiscard]] StepPlan make_step_plan(const BenchStepOptions& options);

/// Makes the heads of --trace or --synthetic. Throws UsageError.
[[nodiscard]] std::unique_ptr<HeadSource> make_source(const BenchStepOptions& options,
                                                      const StepPlan& plan);

}  // namespace keyhole::tools
