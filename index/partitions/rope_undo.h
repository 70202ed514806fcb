// RoPE taken back: keys and queries as they were before the model turned them by their token position.
// Partitions of such vectors do not depend on where in the text a token stands (Saap, section 4).
#pragma once

#include <vector>

#include "index/index.h"
#include "index/serial.h"

namespace keyhole::index {

class RopeUndo {
 public:
  /// Leaves vectors as they are.
  RopeUndo() = default;
  /// For the rows of an index whose row 0 is token `first_position`. `params` null or with theta 0: leaves
  /// vectors as they are. Throws Error(invalid_argument) for parameters that do not fit `dim`.
  RopeUndo(const RopeParams* params, uint32_t dim, uint32_t first_position);

  [[nodiscard]] bool changes() const { return !frequencies_.empty(); }

  /// Turns rows `[n, dim]` back in place; row i is row first + i of the index.
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
};

}  // namespace keyhole::index
