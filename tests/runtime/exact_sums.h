// The two sums that make up attention in double precision, as the models and devices of the tests work it out.
// ThreadSanitizer does not look into them: nine tenths of the time of a test under it went into the numbers of a model that
// one thread has for itself. What other threads write is to be read (copied, converted) outside of them.
#pragma once

#include <cstddef>

namespace keyhole::test {

/// The product of a and b `[n]`, in double precision: four sums, which a core adds side by side.
__attribute__((no_sanitize("thread"))) inline double exact_dot(const float* a, const float* b,
                                                               size_t n) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (size_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * double{b[i + j]};
  }
  for (; i < n; ++i) sums[0] += double{a[i]} * double{b[i]};
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// Adds x `[n]`, weight times, to `sum` `[n]`.
__attribute__((no_sanitize("thread"))) inline void add_weighted(double* sum, double weight,
                                                                const float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += weight * double{x[i]};
}

}  // namespace keyhole::test
