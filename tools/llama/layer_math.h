// The arithmetic on the rows of a layer that a step and a prompt share, family by family as the LlamaConfig says.
#pragma once

#include "tools/llama/rope.h"
#include "tools/llama/vector_math.h"
#include "tools/llama/weights.h"

namespace keyhole::tools {

/// Loops over rows for one model. Borrows the config.
class LayerMath {
 public:
  explicit LayerMath(const LlamaConfig& config)
      : config_(config), eps_(static_cast<float>(config.rms_norm_eps)) {}

  /// Writes one row of the embedding, `[hidden]`.
  void embed(const Matrix& embedding, uint32_t token, float* out) const {
    embedding.rows_to_f32(token, token + 1, out);
    if (config_.embedding_scale != 1.0) {
      scale(static_cast<float>(config_.embedding_scale), config_.hidden_size, out);
    }
  }

  /// Writes out = norm of x, both `[hidden]`; out may be x.
  void normalise(const std::vector<float>& weight, const float* x, float* out) const {
    rms_norm(x, weight.data(), weight.size(), eps_, out);
  }

  /// Turns the product with W_qkv into what attention takes: bias, norms of heads, RoPE. q, k and v lie one behind
  /// the other.
  void finish_qkv(const LayerWeights& weights, const Rope& rope, const float* cosines,
                  const float* sines, float* qkv) const {
    add_bias(weights.qkv_bias, qkv);
    float* const k = qkv + config_.q_width();
    normalise_heads(weights.q_norm, config_.q_heads, qkv);
    normalise_heads(weights.k_norm, config_.kv_heads, k);
    rope.rotate(qkv, config_.q_heads, cosines, sines);
    rope.rotate(k, config_.kv_heads, cosines, sines);
  }

  /// Computes hidden += update `[hidden]`, the product with W_o or W_down, after its bias and norm.
  void add_update(const std::vector<float>& bias, const std::vector<float>& norm, float* update,
                  float* hidden) const {
    add_bias(bias, update);
    if (!norm.empty()) normalise(norm, update, update);
    add(update, config_.hidden_size, hidden);
  }

  /// Computes out = activation(gate) * up, `[intermediate]`; out may be gate_up, where gate and up lie one behind the
  /// other.
  void activate(const LayerWeights& weights, float* gate_up, float* out) const {
    add_bias(weights.gate_up_bias, gate_up);
    const size_t inner = config_.intermediate_size;
    if (config_.activation == Activation::silu) {
      silu_multiply(gate_up, gate_up + inner, inner, out);
    } else {
      gelu_multiply(gate_up, gate_up + inner, inner, out);
    }
  }

  /// Finishes logits `[vocab]` in place.
  void finish_logits(float* logits) const {
    if (config_.final_softcap > 0.0) {
      soft_cap(static_cast<float>(config_.final_softcap), config_.vocab_size, logits);
    }
  }

 private:
  static void add_bias(const std::vector<float>& bias, float* y) {
    if (!bias.empty()) add(bias.data(), bias.size(), y);
  }
  void normalise_heads(const std::vector<float>& weight, uint32_t heads, float* x) const {
    if (weight.empty()) return;
    for (uint32_t head = 0; head < heads; ++head, x += config_.head_dim) normalise(weight, x, x);
  }

  const LlamaConfig& config_;
  float eps_;
};

}  // namespace keyhole::tools
