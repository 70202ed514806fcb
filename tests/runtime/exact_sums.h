// The two sums that make up attention in double precision, as the models and devices of the tests work it out.
// Sanitizers do not look into them: half of the time of all tests under ASan, nine tenths of it under TSan, went into the
// numbers of a model that one thread has for itself. What other threads write is to be read (copied, converted) outside of them.
#pragma once

#include <cstddef>

namespace keyhole::test {

/// The product of a and b `[n]`, in double precision: four sums, which a core adds side by side.
double exact_dot(const float* a, const float* b, size_t n);

/// Adds x `[n]`, weight times, to `sum` `[n]`.
void add_weighted(double* sum, double weight, const float* x, size_t n);

}  // namespace keyhole::test
