// RoPE taken back: keys and queries as they were before the model turned them by their token position.
// Partitions of such vectors do not depend on where in the text a token stands (Saap, section 4).
//
// RoPE turns pairs of channels into each other. If one channel of a pair is much wider than the other in the keys
// that the model compares, or has a constant added, turning back would spread that over both, by another angle for
// every token, and no scale of channels would bring it back. Both can be taken from keys before they are turned back:
// a constant changes no softmax, and a width can go to the queries.
#pragma once

#include <vector>

#include "index/index.h"
#include "index/serial.h"

namespace keyhole::index {

/// The ratio of the scales of a pair's channels up to which they are those of ordinary keys.
inline constexpr float kUnlike = 2.0F;

class RopeUndo {
 public:
  /// Undoes nothing: vectors stay as they are.
  RopeUndo() = default;
  /// Undoes RoPE for the rows of an index whose row 0 is token `first_position`. With `params` null or theta 0
  /// vectors stay as they are. Throws Error(invalid_argument) for parameters that do not fit `dim`.
  RopeUndo(const RopeParams* params, uint32_t dim, uint32_t first_position);

  [[nodiscard]] bool changes() const { return !frequencies_.empty(); }
  /// The channel that a channel is turned into, and which is turned into it; itself: it is not turned.
  [[nodiscard]] uint32_t partner(uint32_t channel) const;

  /// Takes over scales `[dim]` that balance the channels of the keys that the model compares (scan/balance.h), for
  /// the pairs whose two scales differ by more than the factor kUnlike: before either is turned back, keys are
  /// multiplied by them and queries divided. A scale that both channels of a pair share is ignored, because turning
  /// leaves it as it is.
  void balance_pairs(const std::vector<float>& scale);

  /// Sets a constant `[dim]` that is subtracted from all keys before they are turned back; empty: 0.
  void set_offset(std::vector<float> offset) { offset_ = std::move(offset); }

  /// Turns rows `[n, dim]`, all by as many positions, in place: rows of token t become those of token t + positions. No
  /// scale or offset takes part.
  void turn(float* rows, size_t n, int64_t positions) const { turn_back(rows, n, -positions); }

  /// Turns keys `[n, dim]` back in place; key i is row first + i of the index.
  void rows(float* rows, size_t first, size_t n) const;

  /// Returns the group's queries `[group, dim]` turned back: `queries` itself where there is nothing to change, else
  /// `out` `[group, dim]`. Queries of an unknown position are taken for the token that follows the last of `count`
  /// rows.
  [[nodiscard]] const float* queries(const SearchArgs& args, size_t count, float* out) const;

  void save(Writer& out) const;
  /// Reads what save() wrote. Throws Error(corrupt) for what save() of a head dimension `dim` cannot have written.
  [[nodiscard]] static RopeUndo load(Reader& in, uint32_t dim);

 private:
  void turn_back(float* rows, size_t n, int64_t position) const;
  [[nodiscard]] uint32_t pairs() const { return static_cast<uint32_t>(frequencies_.size()); }
  // Of pair i the channels (low, high); `low` is turned towards `high`.
  [[nodiscard]] size_t low(size_t i) const { return interleaved_ ? 2 * i : i; }
  [[nodiscard]] size_t high(size_t i) const { return interleaved_ ? 2 * i + 1 : i + pairs(); }

  uint32_t dim_ = 0;
  uint32_t first_position_ = 0;
  bool interleaved_ = false;
  // Radians per token of each pair. In double: at position 131072 an fp32 angle of the fastest
  // pair is off by up to 0.008.
  std::vector<double> frequencies_;
  std::vector<float> scale_;   // `[dim]`; empty: 1
  std::vector<float> offset_;  // `[dim]`; empty: 0
};

}  // namespace keyhole::index
