// Orthogonal maps that make many heads out of a few. Turned keys and queries keep all their inner products, so that
// attention weights stay those of the original head while every number in memory is another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace keyhole::tools {

enum class TurnKind {
  none,
  /// A random permutation of the components with random signs. It is cheap, and figures of methods that look at
  /// single components (variances, the largest ones, codes of 8 bits) stay those of the head.
  permute,
  /// A random rotation, uniform over all of them: components become alike, which codes of 8 bits profit from, and
  /// methods that look for large components suffer from.
  rotate
};

class HeadTurn {
 public:
  /// The map for these arguments: the same on every machine, up to rounding.
  HeadTurn(TurnKind kind, size_t dim, uint64_t seed);

  /// out = in * M for `count` rows of `dim` floats, one after the other; in and out must not overlap.
  void apply(const float* in, size_t count, float* out) const;

 private:
  size_t dim_;
  std::vector<uint32_t> from_;  ///< permute: component i is sign_[i] * component from_[i]
  std::vector<float> sign_;
  std::vector<float> matrix_;  ///< rotate: `[dim, dim]`
};

/// Mixes a seed and the numbers of a place into a seed for that place.
[[nodiscard]] uint64_t mixed_seed(uint64_t seed, uint64_t a, uint64_t b = 0);

/// Standard normal numbers by Box and Muller, from SplitMix64.
[[nodiscard]] std::vector<float> normal_numbers(size_t count, uint64_t seed);

}  // namespace keyhole::tools
