// The shapes for which tests of the host run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace keyhole::test {

/// Numbers of query heads per KV head: all that a GPU takes, and of the larger ones those of real models and the ends
/// of the range.
inline constexpr uint32_t kGroups[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                       12, 13, 14, 15, 16, 17, 24, 32, 48, 71, 128};

/// Head dimensions: those of real models, and others whose components are cut in other ways.
inline constexpr uint32_t kHeadDims[] = {64, 80, 96, 112, 128, 208, 256, 512, 560, 576};
/// The head dimensions for which a GPU has kernels.
inline constexpr uint32_t kDeviceDims[] = {64, 80, 96, 128, 256};

/// Whether tests that go through all shapes take this one: they do not where both numbers are large.
constexpr bool is_tried(uint32_t dim, uint32_t group) { return dim * group <= 4096 || dim == 64; }

/// A group chosen by a random number.
constexpr uint32_t some_group(uint64_t random) { return kGroups[random % std::size(kGroups)]; }
constexpr uint32_t some_head_dim(uint64_t random) {
  return kHeadDims[random % std::size(kHeadDims)];
}

}  // namespace keyhole::test
