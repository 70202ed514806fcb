// Rotary position embedding, rotate-half form: of the n first components of a head that are turned, component i is
// turned together with component i + n/2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/llama/config.h"

namespace keyhole::tools {

class Rope {
 public:
  /// RoPE of the layers that attend to all tokens.
  explicit Rope(const LlamaConfig& config) : Rope(config.head_dim, config.rope) {}
  /// `rope_tokens`, the length of a sequence, chooses between LongRoPE's frequencies.
  Rope(uint32_t head_dim, const RopeSettings& settings, size_t rope_tokens = 0);
  /// RoPE of whole heads.
  Rope(uint32_t head_dim, double theta, const RopeScaling& scaling)
      : Rope(head_dim, RopeSettings{theta, scaling, head_dim}) {}

  /// Radians per token of each pair: d/2 pairs where whole heads are turned.
  [[nodiscard]] const std::vector<double>& frequencies() const { return frequencies_; }
  [[nodiscard]] size_t pairs() const { return frequencies_.size(); }

  /// Writes cos and sin of position * frequency, `[pairs]` each, times attention_factor. Computed in double: at
  /// position 131072 an fp32 product is wrong by up to 0.008 rad in the fastest pair.
  void angles(uint32_t position, float* cosines, float* sines) const;

  /// The position from which on these frequencies are not the model's: LongRoPE's short factors end with the original
  /// context.
  [[nodiscard]] size_t end() const { return end_; }

  /// Turns `heads` vectors that lie one after the other, `[heads, d]`, in place.
  void rotate(float* x, uint32_t heads, const float* cosines, const float* sines) const;

 private:
  uint32_t head_dim_;
  double factor_;
  size_t end_;
  std::vector<double> frequencies_;
};

/// Whether a sequence of `tokens` tokens has other frequencies in some layer than one of `rope_tokens`: LongRoPE's
/// differ where the original context lies between the two.
[[nodiscard]] bool turns_otherwise(const LlamaConfig& config, size_t rope_tokens, size_t tokens);
/// Whether there are lengths between which turns_otherwise() is true.
[[nodiscard]] bool has_longrope(const LlamaConfig& config);

/// Throws std::runtime_error where a sequence of `tokens` tokens passes `end`, a Rope's end(): every key before it
/// would have to be turned anew.
void check_rope_end(size_t tokens, size_t end);

}  // namespace keyhole::tools
