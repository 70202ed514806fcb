// compare's results as a picture.
#pragma once

#include <string>
#include <vector>

#include "tools/commands/compare_report.h"

namespace keyhole::tools {

/// One SVG file: recall, recovered mass and output error (rows) against scan fraction and median latency
/// (columns). A line for each --index and way to attend, a point for each of its sweep's specs.
[[nodiscard]] std::string to_svg(const std::vector<Summary>& summaries, const std::string& title,
                                 size_t recall_k);

}  // namespace keyhole::tools
