// Level `scalar`: codes of keys and values, one plain loop per kernel.
#include <cmath>
#include <cstring>

#include "cpu/attention_state.h"
#include "cpu/half.h"
#include "cpu/levels.h"

namespace keyhole::cpu {
namespace {

constexpr float kMinExponent = -60.0F;  // as in kernels_scalar.cpp
// A weight below it is 0: its inverse must be finite.
constexpr float kMinWeight = 1e-30F;

float factor(const std::byte* factors, size_t row, size_t which) {
  uint16_t bits;
  std::memcpy(&bits, factors + row * 4 + which * 2, sizeof bits);
  return f16_to_f32(bits);
}

uint32_t word(const std::byte* words, size_t i) {
  uint32_t w;
  std::memcpy(&w, words + i * sizeof w, sizeof w);
  return w;
}

/// Sum of u * q over the components of row `row` of a tile.
int32_t product(const ScoreCodesArgs& a, const std::byte* tile, uint32_t row, const int8_t* query) {
  const uint32_t shifts = 8 / a.bits;
  const uint32_t mask = (1U << a.bits) - 1;
  const size_t pair_bytes = size_t{16} * a.words;
  int32_t high = 0, low = 0;
  for (uint32_t lane = 0; lane < 4; ++lane) {
    for (uint32_t w = row / 8; w < a.words; w += 2) {
      const uint32_t codes = word(tile, (row % 8 * 4 + lane) * a.words + w);
      for (uint32_t byte = 0; byte < 4; ++byte) {
        for (uint32_t t = 0; t < shifts; ++t) {
          const auto u = static_cast<int32_t>(codes >> (8 * byte + a.bits * t) & mask);
          const int8_t* q = query + t * pair_bytes + (lane * a.words + w) * 4 + byte;
          high += u * q[0];
          low += u * q[shifts * pair_bytes];
        }
      }
    }
  }
  return 256 * high + low;
}

}  // namespace

void score_codes_scalar(const ScoreCodesArgs& a) {
  const size_t query_bytes = size_t{32} * (8 / a.bits) * a.words;
  for (uint32_t i = 0; i < 16 * a.tiles; ++i) {
    const std::byte* tile = a.codes + size_t{i / 16} * 128 * a.words;
    for (uint32_t h = 0; h < a.group; ++h) {
      const int32_t sum = product(a, tile, i % 16, a.queries + h * query_bytes);
      const float of_levels = static_cast<float>(2 * sum - a.parts[h].sum) * a.parts[h].scale;
      a.scores[h * a.stride + i] = of_levels * factor(a.factors, i, 0) + a.offsets[h];
    }
  }
}

void weigh_codes_scalar(const WeighCodesArgs& a) {
  for (uint32_t h = 0; h < a.group; ++h) {
    float top = kMinusInf;
    for (uint32_t i = 0; i < 16 * a.tiles; ++i) {
      float& x = a.scores[h * a.stride + i];
      float logit = x * a.logits.scale;
      float slope = a.logits.scale;
      if (a.logits.softcap > 0.0F) {
        const float share = std::tanh(logit / a.logits.softcap);
        logit = a.logits.softcap * share;
        slope *= 1.0F - share * share;
      }
      const float spread = slope * factor(a.factors, i, 0);
      x = logit - 0.5F * spread * spread * a.noises[h];
      top = x > top ? x : top;
    }
    a.maxima[h] = top;
  }
}

void sum_codes_scalar(const SumCodesArgs& a) {
  const uint32_t rows = 16 * a.tiles;
  for (uint32_t h = 0; h < a.group; ++h) {
    float weights[kCodeBlock];
    float largest = 0.0F;
    a.weight_sums[h] = 0.0F;
    for (uint32_t i = 0; i < rows; ++i) {
      const float x = a.log_weights[h * a.stride + i] - a.tops[h];
      const float w = x < kMinExponent ? 0.0F : std::exp(x);
      a.weight_sums[h] += w;
      weights[i] = w * factor(a.factors, i, 1);
      largest = weights[i] > largest ? weights[i] : largest;
    }
    if (a.bits == 0) continue;
    const uint32_t slots = 16 / a.bits;
    const uint32_t mask = (1U << a.bits) - 1;
    const float unit = largest > kMinWeight ? largest / 32767.0F : 0.0F;
    const float inverse = largest > kMinWeight ? 32767.0F / largest : 0.0F;
    float* sums = a.sums + h * a.sum_size;
    for (size_t i = 0; i < a.sum_size; ++i) sums[i] *= a.rescales[h];
    for (uint32_t i = 0; i < rows; ++i) {
      weights[i] = std::nearbyint(weights[i] * inverse);
      sums[a.sum_size - 16] += weights[i] * unit;
    }
    for (uint32_t i = 0; i < 32 * a.words; ++i) {
      int32_t block[16] = {};
      for (uint32_t t = 0; t < a.tiles; ++t) {
        const uint32_t codes = word(a.codes, size_t{t} * 32 * a.words + i);
        for (uint32_t s = 0; s < slots; ++s) {
          for (uint32_t j = 0; j < 2; ++j) {
            const uint32_t row = 16 * t + i / a.words % 4 * 2 + j + s % 4 / 2 * 8;
            const auto u = static_cast<int32_t>(codes >> (16 * j + a.bits * s) & mask);
            block[s / 4 * 2 + s % 2] += u * static_cast<int32_t>(weights[row]);
          }
        }
      }
      for (uint32_t k = 0; k < slots / 2; ++k) {
        sums[k * 32 * a.words + i] += static_cast<float>(block[k]) * unit;
      }
    }
  }
}

}  // namespace keyhole::cpu
