// Runs a model over a prompt and writes its keys, values and queries as a trace: for record, and for calibrate where
// it is given no trace.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tools/commands/common/model_options.h"
#include "tools/commands/common/task_options.h"

namespace keyhole::tools {

struct RecordOptions {
  ModelOptions model;
  TaskOptions task;
  std::string prompt_file;  ///< a text, a file of token ids, or a task: exactly one
  std::string token_file;
  std::string out;               ///< the trace to write
  std::vector<uint32_t> layers;  ///< empty: all
  uint32_t queries = 256;        ///< decode-time queries: the last positions
  uint32_t training = 1024;      ///< earlier positions whose queries may guide an index
  uint32_t threads = 0;
  std::string dtype = "f16";
  bool chat = false;  ///< a task as a conversation in the model's chat template
};

/// The tokens that the model is run over. Throws UsageError for options that do not fit together.
[[nodiscard]] std::vector<uint32_t> prompt_tokens(const RecordOptions& options);

/// Records a trace, with progress on a terminal. Returns a line for people about what was written. Throws UsageError
/// for options that do not fit the prompt.
std::string record_trace(const RecordOptions& options);

/// Traces that are recorded for one run of a command; the destructor removes them.
class TemporaryTraces {
 public:
  /// Throws std::runtime_error where no folder can be made.
  TemporaryTraces();
  ~TemporaryTraces();
  TemporaryTraces(const TemporaryTraces&) = delete;
  TemporaryTraces& operator=(const TemporaryTraces&) = delete;

  /// Records a trace under this name; `options.out` is not read.
  void add(RecordOptions options, const std::string& name);
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] const std::vector<std::string>& paths() const { return paths_; }

 private:
  std::filesystem::path folder_;
  std::vector<std::string> paths_;
};

}  // namespace keyhole::tools
