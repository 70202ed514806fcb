#include "tests/runtime/exact_sums.h"

namespace keyhole::test {

double exact_dot(const float* a, const float* b, size_t n) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (size_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * double{b[i + j]};
  }
  for (; i < n; ++i) sums[0] += double{a[i]} * double{b[i]};
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void add_weighted(double* sum, double weight, const float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += weight * double{x[i]};
}

// Flattened: the standard library's functions would be those that the linker finds first, of any source of the program.
[[gnu::flatten]] void draw_sixteenths(std::mt19937_64& engine, float* out, size_t n) {
  std::uniform_int_distribution<int> sixteenths(-64, 64);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(sixteenths(engine)) / 16.0F;
}

}  // namespace keyhole::test
