// Results of other systems over the same keys and queries, read from files of ann-benchmarks and VIBE: --ann-results.
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

  /// What its row is called: "faiss-ivf: IndexIVFFlat(n_list=1024, n_probe=8)".
  [[nodiscard]] std::string label() const;
  /// Its row without figures: what names it.
  [[nodiscard]] Measurement way() const;
  /// For errors.
  [[nodiscard]] std::string where() const;
};

/// The results in these files, and in all .hdf5 and .h5 files of these folders, that are of a head of the trace by their
/// `dataset` (where it is not said: of a trace of one head). By system, of each by growing time of a query. Throws
/// UsageError where a path holds none, where two have one label, and where `k`, of recall, is above the neighbours that
/// one has; std::runtime_error for a file that cannot be read.
[[nodiscard]] std::vector<OtherResult> read_other_results(const std::vector<std::string>& paths,
                                                          const std::string& trace_path,
                                                          const Trace& trace, size_t k);

/// True where it is of this head.
[[nodiscard]] bool is_of_head(const OtherResult& other, const std::string& trace_path,
                              const Trace& trace, const TraceHead& head);

/// Its figures by the head's own truth: recall, mass and the error of exact attention to its neighbours are computed here;
/// times, build and memory are the file's. What nobody knows is NaN. `queries`: those of the trace that the truth is of.
/// Throws UsageError where the file is of other keys or queries.
[[nodiscard]] Measurement measure_other(const OtherResult& other, const Trace& trace,
                                        const TraceHead& head, const HeadTruth& truth,
                                        const std::vector<size_t>& queries);

}  // namespace keyhole::tools
