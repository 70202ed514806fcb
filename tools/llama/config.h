// The description of what a model computes: the config.json of a Hugging Face folder, validated field by field.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/llama/rope_config.h"

namespace keyhole::tools {

enum class Activation { silu, gelu_tanh };

/// A decoder with RMSNorm, grouped-query attention with rotate-half RoPE and a gated MLP. The families that are built
/// in (llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3) differ by what is set here, and run through one forward
/// pass.
struct LlamaConfig {
  std::string model_type;  ///< "llama", "qwen3", ...; of a model with pictures that of its text
  uint32_t vocab_size = 0;
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;
  uint32_t layers = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t max_context = 0;  ///< max_position_embeddings
  double rms_norm_eps = 1e-6;
  RopeSettings rope;                     ///< of layers that attend to all tokens
  RopeSettings sliding_rope;             ///< of layers with a sliding window
  std::vector<std::string> unread_rope;  ///< see Ropes::unread
  bool tied_output = false;              ///< the output projection is the embedding table
  std::string dtype;  ///< torch_dtype (newer files: dtype), e.g. "bfloat16"; empty: not given
  std::optional<uint32_t> bos_token;
  std::vector<uint32_t> eos_tokens;

  /// `[layers]` the number of last tokens that a layer attends to, itself included; 0: all. Windows as long as the
  /// longest context count as 0.
  std::vector<uint32_t> windows;
  double attention_scale = 0.0;    ///< logit = scale * q.k
  double attention_softcap = 0.0;  ///< c > 0: logit = c * tanh(scale * q.k / c)
  double final_softcap = 0.0;      ///< the same for the output's logits
  double embedding_scale = 1.0;    ///< the embedding's rows are multiplied by it
  Activation activation = Activation::silu;
  bool norm_adds_one = false;  ///< files hold the norms' weights less 1
  bool head_norms = false;     ///< q and k of each head are normalised before RoPE
  bool output_norms =
      false;  ///< attention's and the MLP's output are normalised before they are added
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool fused_tensors = false;  ///< files hold qkv_proj and gate_up_proj
  bool has_pictures = false;   ///< files hold a vision tower as well, which is not read

  /// The longest context that the model was made for: max_position_embeddings. Linear RoPE scaling multiplies it by
  /// its factor. With llama3 and yarn it counts the extension already, and is at least factor times the original.
  [[nodiscard]] uint64_t longest_context() const;
  [[nodiscard]] uint32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] size_t q_width() const { return size_t{q_heads} * head_dim; }
  [[nodiscard]] size_t kv_width() const { return size_t{kv_heads} * head_dim; }

  [[nodiscard]] bool slides(uint32_t layer) const {
    return layer < windows.size() && windows[layer] != 0;
  }
  [[nodiscard]] const RopeSettings& rope_of(uint32_t layer) const {
    return slides(layer) ? sliding_rope : rope;
  }
  /// Number of layers that attend to all tokens; Keyhole holds their K and V.
  [[nodiscard]] uint32_t full_layers() const;
  /// The place of each layer among those that attend to all tokens; nothing for a sliding one.
  [[nodiscard]] std::vector<std::optional<uint32_t>> places_among_full() const;
};

/// Parses a config. Throws std::runtime_error that names `source`, the field, the value seen and the values allowed.
[[nodiscard]] LlamaConfig parse_llama_config(std::string_view json_text, const std::string& source);

/// Reads and parses the file `path`. Throws as parse_llama_config(), or says that the file cannot be read.
[[nodiscard]] LlamaConfig load_llama_config(const std::filesystem::path& path);

}  // namespace keyhole::tools
