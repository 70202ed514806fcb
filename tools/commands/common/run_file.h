// Run files, in the manner of ann-benchmarks' run groups: what compare and bench-step measure, as a file.
//
//   {"format": "keyhole-runs", "version": 1,
//    "trace": "kv32k.safetensors",                      a path beside the run file, unless --trace is given
//    "options": {"queries": 96, "k": 100},              as the options of the command line, which come first
//    "attend": ["topk:100"], "tail": ["none", "second"], "target": ["none"],     of all runs that name none
//    "goals": ["error=0.05"],
//    "runs": [{"index": "ivf", "args": {"C": [512, 1024]}, "query_args": {"probe": "8..64*2"}},
//             {"index": "codes", "attend": ["topk"], "tail": ["codes"]},
//             {"rival": "hnswlib", "query_args": {"ef": [64, 128]}}]}
//
// args and query_args make a sweep. Each value is a number, a text (a range, or a|b) or a list of those. query_args
// vary first, so that parameters that only searches read cause no new build.
#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/options.h"

namespace keyhole::tools {

struct RunFile {
  struct Run {
    std::string spec;  ///< a sweep, as --index and --rival take it
    bool rival = false;
    BudgetLists budgets;  ///< of an index
  };
  std::string trace;  ///< "" where it names none
  std::vector<std::string>
      arguments;  ///< its options, as a command line has them: "--queries", "96"
  std::vector<std::string> goals;
  std::vector<Run> runs;
};

/// Reads and checks a run file. `options`: those that a file may set, without "--". Throws UsageError that names the
/// file and the field that is wrong, and std::runtime_error for a file that cannot be read.
[[nodiscard]] RunFile read_run_file(const std::filesystem::path& path,
                                    std::span<const char* const> options);

/// Reads the file, and parses what was given to `command`, and the file's options where it has none, into the options
/// that `add_options` adds to a command, which are those of `command`. Throws as read_run_file(), and UsageError that
/// names the file.
[[nodiscard]] RunFile resolve_run_file(const CLI::App& command, const std::string& path,
                                       std::span<const char* const> options,
                                       const std::function<void(CLI::App&)>& add_options);

}  // namespace keyhole::tools
