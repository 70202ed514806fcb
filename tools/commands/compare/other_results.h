// --ann-results: results of other systems over the same keys and queries, read from files of ann-benchmarks and VIBE.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/commands/common/head_measure.h"
#include "tools/io/ann_result.h"
#include "tools/io/trace.h"

namespace keyhole::tools {

/// A result and where it comes from.
struct OtherResult {
  std::filesystem::path path;
  AnnResult result;

  /// The label of its row: "faiss-ivf: IndexIVFFlat(n_list=1024, n_probe=8)".
  [[nodiscard]] std::string label() const;
  /// Its row without figures, which names it.
  [[nodiscard]] Measurement way() const;
  /// Where it comes from, for error texts.
  [[nodiscard]] std::string where() const;
};

/// Reads the results in these files, and in all .hdf5 and .h5 files of these folders, that are of a head of the trace
/// by their `dataset` (a trace of one head also takes results that do not name it). They are sorted by system, and
/// within one by growing time of a query. Throws UsageError where a path holds none, where two have one label, and
/// where recall's `k` exceeds the neighbours that one has; std::runtime_error for a file that cannot be read.
[[nodiscard]] std::vector<OtherResult> read_other_results(const std::vector<std::string>& paths,
                                                          const std::string& trace_path,
                                                          const Trace& trace, size_t k);

/// Whether the result is of this head.
[[nodiscard]] bool is_of_head(const OtherResult& other, const std::string& trace_path,
                              const Trace& trace, const TraceHead& head);

/// Computes its figures by the head's own truth: recall, mass and the error of exact attention to its neighbours are
/// computed here; times, build and memory are the file's. Unknown figures are NaN. `queries`: those of the trace that
/// the truth is of. Throws UsageError where the file is of other keys or queries.
[[nodiscard]] Measurement measure_other(const OtherResult& other, const Trace& trace,
                                        const TraceHead& head, const HeadTruth& truth,
                                        const std::vector<size_t>& queries);

}  // namespace keyhole::tools
