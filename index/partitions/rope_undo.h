// RoPE taken back: keys and queries as they were before the model turned them by their token position.
// Partitions of such vectors do not depend on where in the text a token stands (Saap, section 4).
//
// RoPE turns pairs of channels into each other. What one channel of the keys that the model compares has more than the
// other of its pair, a much larger width or a constant, would be spread over both, by another angle for every token, and
// no scale of channels would bring it back. Both can be taken from keys before they are turned back: a constant changes
// no softmax, a width goes to the queries.
#pragma once

#include <vector>

#include "index/index.h"
#include "index/serial.h"

namespace keyhole::index {

/// Scales of a pair's channels that differ by less are those of ordinary keys.
inline constexpr float kUnlike = 2.0F;

class RopeUndo {
 public:
  /// Leaves vectors as they are.
  RopeUndo() = default;
  /// For the rows of an index whose row 0 is token `first_position`. `params` null or with theta 0: leaves
  /// vectors as they are. Throws Error(invalid_argument) for parameters that do not fit `dim`.
  RopeUndo(const RopeParams* params, uint32_t dim, uint32_t first_position);

  [[nodiscard]] bool changes() const { return !frequencies_.empty(); }
  /// Channels i and i + pairs() are turned into each other, i < pairs().
  [[nodiscard]] uint32_t pairs() const { return static_cast<uint32_t>(frequencies_.size()); }

  /// Of the scales `[dim]` that balance the keys' channels as the model compares them (scan/balance.h), takes those of
  /// pairs whose scales are more than kUnlike apart: keys are multiplied by them and queries divided, before either is
  /// turned back. A scale that both channels of a pair share is none: turning leaves it as it is.
  void balance_pairs(const std::vector<float>& scale);

  /// Takes a constant `[dim]` from all keys before they are turned back; empty: 0.
  void set_offset(std::vector<float> offset) { offset_ = std::move(offset); }

  /// Keys: turns rows `[n, dim]` back in place; row i is row first + i of the index.
  void rows(float* rows, size_t first, size_t n) const;

  /// The group's queries `[group, dim]` turned back: `queries` itself where there is nothing to change, else
  /// `out` `[group, dim]`. Queries of an unknown position are taken for the token that follows the last of
  /// `count` rows.
  [[nodiscard]] const float* queries(const SearchArgs& args, size_t count, float* out) const;

  void save(Writer& out) const;
  /// Throws Error(corrupt) for what save() of a head dimension `dim` cannot have written.
  [[nodiscard]] static RopeUndo load(Reader& in, uint32_t dim);

 private:
  void turn_back(float* rows, size_t n, uint32_t position) const;

  uint32_t dim_ = 0;
  uint32_t first_position_ = 0;
  // Radians per token of each pair (i, i + size). In double: at position 131072 an fp32 angle of the fastest
  // pair is off by up to 0.008.
  std::vector<double> frequencies_;
  std::vector<float> scale_;   // `[dim]`; empty: 1
  std::vector<float> offset_;  // `[dim]`; empty: 0
};

}  // namespace keyhole::index
