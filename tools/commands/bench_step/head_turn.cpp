#include "tools/commands/bench_step/head_turn.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "tools/llama/blas.h"
#include "tools/tasks/random.h"

namespace keyhole::tools {
namespace {

// Uniform in (0, 1].
double unit(Random& random) { return (static_cast<double>(random.next() >> 11U) + 1) * 0x1p-53; }

// Gram and Schmidt on Gaussian rows, each row cleaned twice: a rotation uniform over all (or a reflection, which
// keeps inner products as well).
std::vector<float> random_rotation(size_t dim, uint64_t seed) {
  const std::vector<float> gaussian = normal_numbers(dim * dim, seed);
  std::vector<double> m(gaussian.begin(), gaussian.end());
  for (size_t i = 0; i < dim; ++i) {
    double* row = m.data() + i * dim;
    for (int round = 0; round < 2; ++round) {
      for (size_t j = 0; j < i; ++j) {
        const double* other = m.data() + j * dim;
        const double along = std::inner_product(row, row + dim, other, 0.0);
        for (size_t x = 0; x < dim; ++x) row[x] -= along * other[x];
      }
      const double length = std::sqrt(std::inner_product(row, row + dim, row, 0.0));
      for (size_t x = 0; x < dim; ++x) row[x] /= length;
    }
  }
  return {m.begin(), m.end()};
}

}  // namespace

uint64_t mixed_seed(uint64_t seed, uint64_t a, uint64_t b) {
  uint64_t mixed = Random(seed).next();
  mixed = Random(mixed ^ a).next();
  return Random(mixed ^ b).next();
}

std::vector<float> normal_numbers(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> out(count);
  for (size_t i = 0; i < count; i += 2) {
    const double radius = std::sqrt(-2 * std::log(unit(random)));
    const double angle = 2 * 3.14159265358979323846 * unit(random);
    out[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < count) out[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return out;
}

HeadTurn::HeadTurn(TurnKind kind, size_t dim, uint64_t seed) : dim_(dim) {
  if (kind == TurnKind::rotate) {
    matrix_ = random_rotation(dim, seed);
    return;
  }
  from_.resize(dim);
  std::iota(from_.begin(), from_.end(), 0U);
  sign_.assign(dim, 1.0F);
  if (kind == TurnKind::none) return;
  Random random(seed);
  for (size_t i = dim; i > 1; --i) std::swap(from_[i - 1], from_[random.below(i)]);
  for (float& sign : sign_) sign = random.chance(50) ? -1.0F : 1.0F;
}

void HeadTurn::apply(const float* in, size_t count, float* out) const {
  if (!matrix_.empty()) {
    gemm_nn(count, dim_, dim_, in, dim_, matrix_.data(), dim_, 0, out, dim_);
    return;
  }
  for (size_t r = 0; r < count; ++r, in += dim_, out += dim_) {
    for (size_t i = 0; i < dim_; ++i) out[i] = sign_[i] * in[from_[i]];
  }
}

}  // namespace keyhole::tools
