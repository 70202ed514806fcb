// Sixteen floats compared at once: filters in front of loops over scores, most of which are too low to matter.
// Written with the compiler's portable vectors, because its own vectoriser leaves such any-of loops scalar (GCC 12
// unrolls them to 16 compares); 128 bits is the width that the baseline instruction sets have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace keyhole::index {

inline constexpr size_t kSixteen = 16;

namespace detail {
using Quad = float __attribute__((vector_size(16)));
using QuadMask = int32_t __attribute__((vector_size(16)));

inline Quad load(const float* x) {
  Quad q;
  std::memcpy(&q, x, sizeof q);
  return q;
}
inline bool all_set(QuadMask mask) {
  int64_t halves[2];
  std::memcpy(halves, &mask, sizeof mask);
  return (halves[0] & halves[1]) == -1;
}
}  // namespace detail

/// Whether x[0..16) are all below `limit`; a NaN is not.
inline bool all_below(const float* x, float limit) {
  using namespace detail;
  const Quad bound = Quad{} + limit;
  return all_set((load(x) < bound) & (load(x + 4) < bound) & (load(x + 8) < bound) &
                 (load(x + 12) < bound));
}

/// Whether x[i] - y[i] is above `limit` for none of 16 elements.
inline bool no_difference_above(const float* x, const float* y, float limit) {
  using namespace detail;
  const Quad bound = Quad{} + limit;
  QuadMask above = {};
  for (size_t i = 0; i < kSixteen; i += 4) above |= load(x + i) - load(y + i) > bound;
  return all_set(~above);
}

}  // namespace keyhole::index
