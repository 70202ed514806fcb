// compare's results as a picture.
#pragma once

#include <string>
#include <vector>

#include "tools/commands/compare/report.h"

namespace keyhole::tools {

/// One SVG file of two panels: output error against the bytes that a step reads and against median latency; of
/// recall where the trace has no values, which an output needs. A line for each --index and budget, a point for
/// each of its sweep's specs.
[[nodiscard]] std::string to_svg(const std::vector<Summary>& summaries, const std::string& title,
                                 size_t recall_k);

}  // namespace keyhole::tools
