// The two sums of attention in double precision, as the models and devices of the tests compute it, and the random
// numbers that they are computed from. Sanitizers do not look into them: half of the time of all tests under ASan,
// nine tenths of it under TSan, went into the numbers of a model that one thread has for itself. Numbers that other
// threads write must be read (copied, converted) outside of them.
// converted) outside of them.
#pragma once

#include <cstddef>
#include <random>

namespace keyhole::test {

/// The product of a and b `[n]`, in double precision: four sums, which a core adds side by side.
double exact_dot(const float* a, const float* b, size_t n);

/// Adds weight times x `[n]` to `sum` `[n]`.
void add_weighted(double* sum, double weight, const float* x, size_t n);

/// Writes n multiples of 1/16 from -4 to 4, which 16-bit types hold exactly, to `out` `[n]`.
void draw_sixteenths(std::mt19937_64& engine, float* out, size_t n);

}  // namespace keyhole::test
