// The shapes that tests of the host go through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace keyhole::test {

/// Query heads per KV head: all that a GPU takes, and of the larger ones those of real models, and the ends of the range.
inline constexpr uint32_t kGroups[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,
                                       12, 13, 14, 15, 16, 17, 24, 32, 48, 71, 128};

/// One of them, by a random number.
constexpr uint32_t some_group(uint64_t random) { return kGroups[random % std::size(kGroups)]; }

}  // namespace keyhole::test
