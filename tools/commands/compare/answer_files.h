// --ann-hdf5: the answers of every way to every query, as files that the tools of ann-benchmarks and VIBE read.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/commands/common/head_answers.h"
#include "tools/commands/common/head_measure.h"
#include "tools/io/trace.h"

namespace keyhole::tools {

/// The data set's name for ann-benchmarks and VIBE: the file's name without its ending; for a trace of several heads
/// "NAME-layer3-kv1".
[[nodiscard]] std::string dataset_name(const std::string& trace_path, const Trace& trace,
                                       uint32_t layer, uint32_t kv_head);

/// The rows of `test` (queries times group, query heads of a query side by side) that the rows of a truth are.
[[nodiscard]] std::vector<int64_t> test_rows(const std::vector<size_t>& queries, size_t group);

/// Writes a file for each way and head, FOLDER/DATASET/COUNT/ALGORITHM/WAY.hdf5, as soon as it is measured.
class AnswerFiles {
 public:
  enum class Layout { ann_benchmarks, vibe };

  /// Makes the folder. count: neighbours that a file has for each query, --k. queries: those of the trace that are
  /// used. `trace` must outlive the object. Throws std::runtime_error where the folder cannot be made, and in a build
  /// without HDF5.
  AnswerFiles(std::filesystem::path folder, Layout layout, const std::string& trace_path,
              const Trace& trace, size_t count, std::vector<size_t> queries);

  [[nodiscard]] size_t count() const { return count_; }
  /// Whether the file of a row exists, whose index, attend, tail, target, layer and KV head are known.
  [[nodiscard]] bool has(const Measurement& m) const { return std::filesystem::exists(path_of(m)); }
  /// Writes the file of a row. Throws std::runtime_error where it cannot be written.
  void write(const Measurement& m, const HeadTruth& truth, const HeadAnswers& answers) const;

 private:
  [[nodiscard]] std::filesystem::path path_of(const Measurement& m) const;

  std::filesystem::path folder_;
  Layout layout_;
  std::string trace_path_;
  const Trace& trace_;
  size_t count_;
  std::vector<size_t> queries_;
};

}  // namespace keyhole::tools
