// A file that the rows of a comparison are appended to as they are measured, so that a sweep that was stopped goes on.
//
// A line of JSON each (JSON Lines): first a header that says what is measured where, then rows as in "results" of the JSON
// result. Rows are appended by one write for all heads of a batch, then synced: a line is there whole, or, where the
// machine stopped within the write, cut off at the end of the file, where the next run removes it.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "runtime/files/json.h"
#include "tools/commands/common/head_measure.h"

namespace keyhole::tools {

/// What makes a row another one: index, attend, tail, target, layer, KV head.
[[nodiscard]] std::string row_key(const Measurement& m);

/// The row that to_json() of report.h has written. Throws nlohmann::json::exception for anything else.
[[nodiscard]] Measurement measurement_of(const nlohmann::ordered_json& row);

class ResultsFile {
 public:
  /// Makes the file, or reads the one that is there; no other process may have it open so. `header`: what rows depend on
  /// beside their key, an object of objects. Throws UsageError where the file is one of another header, naming what
  /// differs, where it is no such file, and where another process writes it; std::system_error where it cannot be opened.
  ResultsFile(std::filesystem::path path, const nlohmann::ordered_json& header);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  [[nodiscard]] const std::vector<Measurement>& rows() const { return rows_; }
  [[nodiscard]] bool knows(const std::string& key) const { return keys_.count(key) != 0; }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  /// Adds those of `rows` that it does not know. Throws std::system_error; then the file is as it was.
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
