// Counts that wrap around, in int: the type that atomic::wait hands to the futex without a proxy.
#pragma once

#include <cstdint>

namespace keyhole::runtime {

/// a - b, of counts that are less than 2^31 apart.
inline int difference(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

}  // namespace keyhole::runtime
