// Results of searches in the HDF5 layout of ann-benchmarks and VIBE: the answers of one way of searching to every
// query.
//
//   attributes   algo, name, dataset, distance (texts); count, build_time (s), best_search_time (s), index_size (kB
//                of 1024 bytes), candidates
//   times        [rows]         seconds of each query
//   neighbors    [rows, count]  places of keys among the data set's `train`, the best first; -1 where there were fewer
//   distances    [rows, count]  of those, infinite where there were fewer; optional
//   queries      [rows]         which rows of `test` these are; ours alone: without it, all of them in order
//
// ann-benchmarks: one result a file, in the file's root. VIBE: a group for each result, named by its search parameters.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace keyhole::tools {

struct AnnResult {
  static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

  std::string group;  ///< VIBE's group; "": the file's root, as ann-benchmarks has it
  std::string algo, name, dataset, distance;  ///< "" where the file does not say it
  double build_seconds = kUnknown, best_search_seconds = kUnknown, index_kib = kUnknown,
         candidates = kUnknown;
  size_t count = 0;                 ///< neighbours of a query
  std::vector<double> seconds;      ///< `[rows]`
  std::vector<int64_t> neighbours;  ///< `[rows, count]`, -1: none
  std::vector<float> distances;     ///< `[rows, count]`; empty: not told
  std::vector<int64_t> queries;     ///< `[rows]`; empty: all of the data set in order

  [[nodiscard]] size_t rows() const { return seconds.size(); }
};

/// Reads all results of a file. Throws std::runtime_error that names the file and what is wrong; in a build without
/// HDF5, a text that says so.
[[nodiscard]] std::vector<AnnResult> read_ann_results(const std::filesystem::path& path);

/// Writes a new file that takes the name of `path`, whose folder exists. Throws as read_ann_results().
void write_ann_result(const std::filesystem::path& path, const AnnResult& result);

/// Throws, in a build without HDF5, as the two above do.
void check_has_hdf5(const std::string& option);

}  // namespace keyhole::tools
