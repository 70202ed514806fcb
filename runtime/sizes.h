// Products of sizes that refuse to overflow.
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

}  // namespace keyhole::runtime
