// Rotary position embedding, rotate-half form: component i is turned together with component i + d/2.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/llama/config.h"

namespace keyhole::tools {

class Rope {
 public:
  explicit Rope(const LlamaConfig& config)
      : Rope(config.head_dim, config.rope_theta, config.rope_scaling) {}
  Rope(uint32_t head_dim, double theta, const RopeScaling& scaling);

  /// Radians per token of each of the d/2 pairs.
  [[nodiscard]] const std::vector<double>& frequencies() const { return frequencies_; }

  /// Writes cos and sin of position * frequency, `[d/2]` each. Computed in double: at position 131072 an
  /// fp32 product is wrong by up to 0.008 rad in the fastest pair.
  void angles(uint32_t position, float* cosines, float* sines) const;

  /// Turns `heads` vectors that lie one after the other, `[heads, d]`, in place.
  void rotate(float* x, uint32_t heads, const float* cosines, const float* sines) const;

 private:
  std::vector<double> frequencies_;
};

}  // namespace keyhole::tools
