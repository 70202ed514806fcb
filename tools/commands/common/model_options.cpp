#include "tools/commands/common/model_options.h"

#include <cstdlib>

#include "tools/commands/common/bundled_model.h"
#include "tools/llama/config.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

ModelTokens tokens_of(const LlamaConfig& model) {
  return {.vocab_size = model.vocab_size, .bos = model.bos_token, .end_tokens = model.eos_tokens};
}

}  // namespace

void add_model_options(CLI::App& command, ModelOptions& options) {
  command
      .add_option(
          "--model", options.folder,
          "Hugging Face folder (config.json and safetensors): llama, mistral, qwen2, qwen3, "
          "gemma2, gemma3 or phi3; default: the bundled "
          "model, or the folder in KEYHOLE_MODEL")
      ->type_name("DIR");
}

void check_model_folder(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_regular_file(folder, ignored)) return;
  throw UsageError("--model " + folder.string() +
                   " is a file; needed: a Hugging Face folder with config.json and safetensors" +
                   (folder.extension() == ".gguf"
                        ? " (GGUF files are not read: they are made from such a folder)"
                        : ""));
}

fs::path model_folder(const ModelOptions& options) {
  if (options.folder.empty()) return bundled_model_folder();
  check_model_folder(options.folder);
  return options.folder;
}

LlamaModel load_model(const ModelOptions& options) { return load_llama(model_folder(options)); }

Runner make_runner(const ModelOptions& options, uint32_t threads) {
  return {load_model(options),
          options.device,
          threads,
          {options.prefill, options.check_prefill, options.chunk, options.products}};
}

std::unique_ptr<const Tokenizer> find_tokenizer(const ModelOptions& options,
                                                const LlamaConfig& model) {
  return find_tokenizer(model_folder(options), tokens_of(model));
}

std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options,
                                                const LlamaConfig& model) {
  return load_tokenizer(model_folder(options), tokens_of(model));
}

std::unique_ptr<const Tokenizer> load_tokenizer(const ModelOptions& options) {
  return load_tokenizer(options, load_llama_config(model_folder(options) / "config.json"));
}

ChatTemplate load_chat(const ModelOptions& options) {
  return ChatTemplate::load(model_folder(options));
}

std::string model_name(const ModelOptions& options) {
  if (options.folder.empty() && std::getenv("KEYHOLE_MODEL") == nullptr) return "bundled";
  const fs::path folder = fs::absolute(model_folder(options)).lexically_normal();
  return folder.has_filename() ? folder.filename() : folder.parent_path().filename();
}

}  // namespace keyhole::tools
