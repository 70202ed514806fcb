// A block of codes read back in double precision, straight from its layout (cpu/code_layout.h): what a row's code
// stands for.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/code_layout.h"
#include "cpu/half.h"

namespace keyhole::gpu::test {

/// Rotates a row, or back.
inline void rotate_row(std::vector<double>& x, bool back) {
  const auto dim = static_cast<uint32_t>(x.size());
  const uint32_t passes = hadamard_passes(dim);
  for (uint32_t i = 0; i < passes; ++i) {
    const uint32_t number = back ? passes - 1 - i : i;
    const HadamardPass pass = hadamard_pass(dim, number);
    double* const part = x.data() + pass.begin;
    for (uint32_t j = 0; !back && j < pass.size; ++j) part[j] *= double{code_sign(number, j)};
    for (uint32_t step = 1; step < pass.size; step *= 2) {
      for (uint32_t j = 0; j < pass.size; ++j) {
        if ((j & step) != 0) continue;
        const double a = part[j], b = part[j + step];
        part[j] = a + b;
        part[j + step] = a - b;
      }
    }
    const double norm = 1.0 / std::sqrt(static_cast<double>(pass.size));
    for (uint32_t j = 0; j < pass.size; ++j) {
      part[j] *= back ? norm * double{code_sign(number, j)} : norm;
    }
  }
}

/// Codes of one KV head, decoded: rows as they were, but for what codes lose, and how far a logit may be off.
struct DecodedCodes {
  CodeShape shape;
  std::vector<float> key_scale;
  float value_scale = 1.0F;

  /// The balanced and rotated query, for which keys' codes are.
  [[nodiscard]] std::vector<double> query(const float* q) const {
    std::vector<double> x(shape.dim);
    for (uint32_t j = 0; j < shape.dim; ++j) x[j] = double{q[j]} / double{key_scale[j]};
    rotate_row(x, false);
    return x;
  }
  /// Row `row` of a block: its key and its value as they are coded, and f^2 noise.
  struct Row {
    std::vector<double> key, value;
    double noise = 0.0;
  };
  [[nodiscard]] Row row(const std::byte* block, uint32_t row) const {
    const uint32_t d = shape.dim, tile = row / kCodeTile, in_tile = row % kCodeTile;
    const auto half = [&](size_t at) {
      uint16_t bits;
      std::memcpy(&bits, block + at, 2);
      return double{cpu::f16_to_f32(bits)};
    };
    const auto code = [&](size_t at, size_t words, CodePlace place, uint32_t bits) {
      uint32_t word;
      std::memcpy(&word, block + at + (size_t{tile} * kCodeLanes * words + place.word) * 4, 4);
      const uint32_t u = word >> place.shift & ((1U << bits) - 1);
      return 2.0 * u + 1.0 - static_cast<double>(1U << bits);
    };
    const double f = half(shape.factors_at() + size_t{row} * 4);
    const double g = half(shape.factors_at() + size_t{row} * 4 + 2);
    float noise;
    std::memcpy(&noise, block + shape.noise_at(), 4);
    Row r;
    r.noise = f * f * double{noise};
    for (uint32_t j = 0; j < d; ++j) {
      r.key.push_back(half(shape.key_mean_at() + size_t{j} * 2) +
                      f * code(0, shape.key_words(), shape.key_place(in_tile, j), shape.key_bits));
      r.value.push_back(half(shape.value_mean_at() + size_t{j} * 2) +
                        g * code(shape.values_at(), shape.value_words(),
                                 shape.value_place(in_tile, j), shape.value_bits));
    }
    return r;
  }
  /// A sum of weighted values by code, in the units of values as they were.
  [[nodiscard]] std::vector<double> output(std::vector<double> o) const {
    rotate_row(o, true);
    for (double& x : o) x *= double{value_scale};
    return o;
  }
};

}  // namespace keyhole::gpu::test
