// The outputs of compare: a table, JSON, CSV, SVG, a page.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "tools/commands/compare/advice.h"
#include "tools/commands/compare/options.h"
#include "tools/commands/compare/report.h"
#include "tools/commands/compare/run.h"
#include "tools/terminal/machine.h"

namespace keyhole::tools {

/// A comparison: what was compared, where, and with which results.
struct ComparisonResult {
  const CompareOptions& options;
  const Trace& trace;
  const ComparisonPlan& plan;
  Machine machine;
  std::vector<Measurement> rows;
  std::vector<Summary> summaries;  ///< in the order that they are shown in
  std::optional<Advice> advice;    ///< with --goal
};

/// Throws where an output could not be written, before the work begins.
void check_outputs(const CompareOptions& options);

/// The JSON result; docs/compare.schema.json describes it. Curves and page are drawn from it.
[[nodiscard]] nlohmann::ordered_json compare_document(const ComparisonResult& result);

/// The facts on which the rows of a file of --resume depend, beside their index, budget and head.
[[nodiscard]] nlohmann::ordered_json resume_header(const ComparisonResult& result);

/// Prints the tables, unless standard output is taken by another output, and writes all files that were asked for.
void write_outputs(const ComparisonResult& result);

}  // namespace keyhole::tools
