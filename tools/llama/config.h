// config.json of a Hugging Face Llama folder, validated field by field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools {

/// How RoPE's frequencies are changed for contexts longer than those of the first training.
struct RopeScaling {
  enum class Kind { none, linear, llama3 };
  Kind kind = Kind::none;
  double factor = 1.0;            ///< linear, llama3
  double low_freq_factor = 1.0;   ///< llama3
  double high_freq_factor = 4.0;  ///< llama3
  uint32_t original_context = 0;  ///< llama3: original_max_position_embeddings
};

/// The shape of a Llama: RMSNorm, grouped-query attention with rotate-half RoPE, SwiGLU, no biases.
struct LlamaConfig {
  uint32_t vocab_size = 0;
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t max_context = 0;  ///< max_position_embeddings
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool tied_output = false;  ///< the output projection is the embedding table
  std::string dtype;  ///< torch_dtype (newer files: dtype), e.g. "bfloat16"; empty: not given
  std::optional<uint32_t> bos_token;
  std::vector<uint32_t> eos_tokens;

  /// The longest context that the model was made for: max_position_embeddings. Linear RoPE scaling multiplies it by
  /// its factor. With llama3 scaling it counts the extension already, and is at least factor times the original.
  [[nodiscard]] uint64_t longest_context() const;
  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] size_t q_width() const { return size_t{q_heads} * head_dim; }
  [[nodiscard]] size_t kv_width() const { return size_t{kv_heads} * head_dim; }
};

/// Throws std::runtime_error that names `source`, the field, the value seen and the values allowed.
[[nodiscard]] LlamaConfig parse_llama_config(std::string_view json_text, const std::string& source);

/// Reads `path` and parses it; throws as above, or says that the file cannot be read.
[[nodiscard]] LlamaConfig load_llama_config(const std::filesystem::path& path);

}  // namespace keyhole::tools
