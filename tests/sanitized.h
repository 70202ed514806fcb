// Sanitizers make tests take 5 to 30 times as long. Loops over random cases and lengths that only add more of the same
// are shorter under them; what is asserted stays, and so does every path.
#pragma once

#include <cstdint>

namespace keyhole::test {

#ifdef KEYHOLE_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// `all`; under a sanitizer `fewer`.
constexpr uint32_t unless_sanitized(uint32_t all, uint32_t fewer) {
  return kSanitized ? fewer : all;
}

/// How many random cases a property test tries: under a sanitizer a quarter.
constexpr uint32_t cases(uint32_t n) { return unless_sanitized(n, (n + 3) / 4); }

}  // namespace keyhole::test
