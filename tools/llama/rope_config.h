// RoPE as a config.json describes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace keyhole::tools {

class Fields;

/// How RoPE's frequencies are changed for contexts longer than those of the first training.
struct RopeScaling {
  enum class Kind { none, linear, llama3, yarn, longrope };
  Kind kind = Kind::none;
  double factor = 1.0;            ///< linear, llama3, yarn
  double low_freq_factor = 1.0;   ///< llama3
  double high_freq_factor = 4.0;  ///< llama3
  uint32_t original_context = 0;  ///< llama3, yarn, longrope: original_max_position_embeddings
  double beta_fast = 32.0;  ///< yarn: turns within the original context above which pairs stay
  double beta_slow = 1.0;   ///< yarn: turns below which they are slowed down by the factor
  bool whole_pairs = true;  ///< yarn: the borders between the two are rounded outwards
  double attention_factor = 1.0;  ///< yarn, longrope: what cos and sin are multiplied by
  /// longrope: the factor by which each pair is slowed down, in prompts up to the original context and in longer
  /// ones. As many as pairs.
  std::vector<double> short_factors, long_factors;

  bool operator==(const RopeScaling&) const = default;
};

/// The RoPE settings of a layer.
struct RopeSettings {
  double theta = 10000.0;
  RopeScaling scaling;
  uint32_t dims = 0;  ///< even: so many first components of a head are turned, the others stay

  bool operator==(const RopeSettings&) const = default;
};

/// The rules of a family for RoPE.
struct RopeRules {
  double theta = 10000.0;      ///< where config.json gives none
  double sliding_theta = 0.0;  ///< > 0: sliding layers have a RoPE of their own, without scaling
  bool partial = false;        ///< partial_rotary_factor may be below 1
  bool only_longrope = false;  ///< every scaling is LongRoPE, by whatever name
  uint32_t head_dim = 0;
  uint32_t max_context = 0;       ///< max_position_embeddings
  uint32_t original_context = 0;  ///< LongRoPE's where config.json gives none; 0: max_context
};

struct Ropes {
  RopeSettings full;     ///< of layers that attend to all tokens
  RopeSettings sliding;  ///< of those with a sliding window
  /// Fields of the scaling that nothing here reads, each once: other programs may read them, and then compute
  /// something else.
  std::vector<std::string> unread;
};

/// Reads `rope_theta`, `rope_scaling`, `rope_local_base_freq` and `partial_rotary_factor`, or all of them inside
/// `rope_parameters` (newer files; there once for each kind of layer where they differ).
[[nodiscard]] Ropes parse_ropes(const Fields& fields, const RopeRules& rules);

}  // namespace keyhole::tools
