// A file to which the rows of a comparison are appended as they are measured, so that a sweep that was stopped can go
// on.
//
// It holds JSON Lines: first a header that says what is measured where, then rows as in "results" of the JSON result.
// Rows of all heads of a batch are appended by one write, then synced. So a line is whole, unless the machine stopped
// within the write: then the last line is cut off, and the next run removes it.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/common/head_measure.h"

namespace keyhole::tools {

/// The key that tells rows apart: index, attend, tail, target, layer, KV head.
[[nodiscard]] std::string row_key(const Measurement& m);

/// Reads a row that to_json() of report.h has written. Throws nlohmann::json::exception for anything else.
[[nodiscard]] Measurement measurement_of(const nlohmann::ordered_json& row);

class ResultsFile {
 public:
  /// Makes the file, or reads it if it exists; no other process may have it open in this way. `header`: an object of
  /// objects, on which rows depend beside their key. Throws UsageError where the file has another header, naming what
  /// differs, where it is no such file, and where another process writes it; std::system_error where it cannot be
  /// opened.
  ResultsFile(std::filesystem::path path, const nlohmann::ordered_json& header);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  [[nodiscard]] const std::vector<Measurement>& rows() const { return rows_; }
  [[nodiscard]] bool knows(const std::string& key) const { return keys_.count(key) != 0; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  /// Adds those of `rows` that it does not have. Throws std::system_error; then the file is unchanged.
  void append(const std::vector<Measurement>& rows);

 private:
  void read(const nlohmann::ordered_json& header);
  void write(const std::string& text);
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_;
  int file_ = -1;
  std::vector<Measurement> rows_;
  std::set<std::string> keys_;
};

}  // namespace keyhole::tools
