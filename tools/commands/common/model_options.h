// The options of commands that run a model, and what its folder holds: the model, its tokenizer, its chat template.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/runner.h"
#include "tools/tokenizer/chat.h"

namespace keyhole::tools {

/// Options of commands that run a model: `--model`, and `--device` of those that have add_device_option().
struct ModelOptions {
  std::string folder;  ///< empty: the bundled model
  std::string device = "auto";
  std::string gpu_memory;  ///< of commands that have add_gpu_memory_option(); empty: no limit
  std::string prefill = "dense";  ///< of commands that have add_prefill_option()
  bool check_prefill = false;     ///< GpuModel::check_prefill()
  std::string products = "auto";  ///< of commands that have add_products_option()
  uint32_t chunk = 0;             ///< of commands that have add_chunk_option(), see PrefillChoice
};
void add_model_options(CLI::App& command, ModelOptions& options);

/// Throws UsageError where a model's folder is a file, as GGUF files are.
void check_model_folder(const std::filesystem::path& folder);
/// Returns `options.folder`, or the bundled model's folder. Throws as check_model_folder().
[[nodiscard]] std::filesystem::path model_folder(const ModelOptions& options);
/// Loads `options.folder` or the bundled model.
[[nodiscard]] LlamaModel load_model(const ModelOptions& options);
/// Loads the model like load_model(), ready to run.
[[nodiscard]] Runner make_runner(const ModelOptions& options, uint32_t threads);
/// The name under which results mention the model: its folder's last part.
[[nodiscard]] std::string model_name(const ModelOptions& options);

/// The tokenizer of the model's folder; nullptr where it has none. Throws std::runtime_error for one that is broken.
[[nodiscard]] std::unique_ptr<const Tokenizer> find_tokenizer(const ModelOptions& options,
                                                              const LlamaConfig& model);
/// find_tokenizer() that throws std::runtime_error where there is none.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options,
                                                              const LlamaConfig& model);

/// load_tokenizer() from the folder's config.json alone, so that errors in text are reported before gigabytes of
/// weights are read.
[[nodiscard]] std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options);

/// The chat template of the model's folder. Throws std::runtime_error where there is none, or an unknown one.
[[nodiscard]] ChatTemplate load_chat(const ModelOptions& options);

}  // namespace keyhole::tools
