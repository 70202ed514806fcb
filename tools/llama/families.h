// The families of models that the decoder knows, as a table of what their config.json does not say.
#pragma once

#include <cstdint>
#include <string>

#include "tools/llama/config.h"

namespace keyhole::tools {

struct Family {
  /// Which layers have a sliding window.
  enum class Sliding {
    none,
    every_layer,     ///< where sliding_window is given
    from_max_layer,  ///< with use_sliding_window: from layer max_window_layers on, or by layer_types
    pattern          ///< all but every n-th, or by layer_types
  };

  const char* model_type;
  bool qkv_bias = false;                 ///< q, k and v always have a bias
  bool may_have_attention_bias = false;  ///< attention_bias: q, k, v and o
  bool may_have_mlp_bias = false;
  bool head_norms = false;
  bool fused_tensors = false;
  /// Norms of 1 + weight, also behind attention and MLP; scaled embedding; query_pre_attn_scalar.
  bool gemma = false;
  bool may_have_attention_softcap = false;
  bool partial_rope = false;
  bool only_longrope = false;
  const char* activation_field = "hidden_act";
  const char* activation = "silu";
  Sliding sliding = Sliding::none;
  uint32_t pattern = 0;  ///< n of Sliding::pattern

  // Values for fields that config.json may leave out; 0: it may not.
  uint32_t vocab_size = 0;
  uint32_t q_heads = 0;
  uint32_t kv_heads = 0;  ///< 0: as many as query heads
  uint32_t head_dim = 0;  ///< 0: hidden_size / heads
  uint32_t max_context = 2048;
  uint32_t original_context = 0;  ///< of LongRoPE
  uint32_t window = 0;
  double rms_norm_eps = 1e-6;
  double theta = 10000.0;
  double sliding_theta = 0.0;  ///< > 0: sliding layers have a RoPE of their own
  double final_softcap = 0.0;
  bool tied_output = false;
};

/// The family of that model_type, or nullptr.
[[nodiscard]] const Family* find_family(const std::string& model_type);
/// The families for error texts: `"llama", "mistral", ...`.
[[nodiscard]] std::string family_names();

}  // namespace keyhole::tools
