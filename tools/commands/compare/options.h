// The options of compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/options.h"
#include "tools/commands/common/run_file.h"
#include "tools/io/vector_trace.h"

namespace keyhole::tools {

/// The options as given on the command line.
struct CompareOptions {
  std::string trace;
  VectorFiles vectors;
  std::vector<std::string> indexes, rivals;
  BudgetLists budgets;
  uint32_t k = 100;
  std::optional<uint32_t> sink, window;
  unsigned threads = 0;
  std::vector<uint32_t> layers, heads;
  size_t queries = 1000;
  std::string kv_dtype = "f16";
  std::string classifiers;
  std::string json, csv, ann_csv, svg, html;
  std::string ann_hdf5, ann_layout = "ann-benchmarks";
  std::vector<std::string> ann_results;
  std::string runs, resume;
  std::vector<RunFile::Run>
      groups;  ///< of the run file; then those of --index and --rival, by resolve_runs()
  std::string sort = "none";
  std::vector<std::string> goals;
  bool per_head = false;
};

/// Adds all options, and the help. `options` must outlive the command.
void add_compare_options(CLI::App& command, CompareOptions& options);

/// Joins the command line and its --runs: takes the file's trace, options and goals where the command line has none,
/// and puts every index and rival with its budgets into `groups`. Throws UsageError.
[[nodiscard]] CompareOptions resolve_runs(const CLI::App& command, CompareOptions given);

}  // namespace keyhole::tools
