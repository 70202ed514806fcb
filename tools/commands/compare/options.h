// The options of compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/options.h"
#include "tools/io/vector_trace.h"

namespace keyhole::tools {

/// As given on the command line.
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
  std::string json, csv, svg, html;
  std::string sort = "none";
  std::vector<std::string> goals;
  bool per_head = false;
};

/// Adds them all, and the help. `options` must outlive the command.
void add_compare_options(CLI::App& command, CompareOptions& options);

}  // namespace keyhole::tools
