// Sizes that refuse to overflow, and to pass a limit.
#pragma once

#include <initializer_list>
#include <string>

#include "cpu/types.h"

namespace keyhole::runtime {

/// The product of the factors; throws Error(out_of_memory) where it passes 2^63.
[[nodiscard]] inline size_t checked_product(std::initializer_list<size_t> factors,
                                            const char* what) {
  size_t product = 1;
  for (const size_t f : factors) {
    if (__builtin_mul_overflow(product, f, &product) || product > (size_t{1} << 63)) {
      throw Error(Status::out_of_memory, std::string(what) + " would pass 2^63 bytes");
    }
  }
  return product;
}

/// The sum of two such; throws as above.
[[nodiscard]] inline size_t checked_sum(size_t a, size_t b, const char* what) {
  size_t sum = 0;
  if (!__builtin_add_overflow(a, b, &sum) && sum <= (size_t{1} << 63)) return sum;
  throw Error(Status::out_of_memory, std::string(what) + " would pass 2^63 bytes");
}

/// Throws Error(out_of_memory) where `more` bytes beyond the `held` ones would pass the limit of a session.
inline void check_host_memory(uint64_t limit, uint64_t held, uint64_t more, const char* what) {
  if (held + more <= limit) return;
  throw Error(Status::out_of_memory, std::string(what) + " needs " + std::to_string(more) +
                                         " bytes more than the " + std::to_string(held) +
                                         " held, host_memory_limit is " + std::to_string(limit));
}

}  // namespace keyhole::runtime
