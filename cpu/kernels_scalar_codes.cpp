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

/// Sum of u * q over the components of row `row` of a tile, of one part of a query.
int32_t product(const ScoreCodesArgs& a, const std::byte* tile, uint32_t row, const int8_t* query) {
  const uint32_t shifts = 8 / a.bits;
  const uint32_t mask = (1U << a.bits) - 1;
  int32_t sum = 0;
  for (uint32_t lane = 0; lane < 4; ++lane) {
    for (uint32_t w = row / 8; w < a.words; w += 2) {
      const uint32_t codes = word(tile, (row % 8 * 4 + lane) * a.words + w);
      const int8_t* q = query + size_t{lane * (a.words / 2) + w / 2} * shifts * 4;
      for (uint32_t i = 0; i < 4 * shifts; ++i) {
        sum += static_cast<int32_t>(codes >> (i % 4 * 8 + i / 4 * a.bits) & mask) * q[i];
      }
    }
  }
  return sum;
}

/// The logit of a score less what the noise of its code adds to its mean weight.
float log_weight(const LogitParams& logits, float score, float f, float noise) {
  float logit = score * logits.scale;
  float slope = logits.scale;
  if (logits.softcap > 0.0F) {
    const float share = std::tanh(logit / logits.softcap);
    logit = logits.softcap * share;
    slope *= 1.0F - share * share;
  }
  const float spread = slope * f;
  const float bias = 0.5F * spread * spread * noise;
  return logit - (bias < kMostNoiseBias ? bias : kMostNoiseBias);
}

}  // namespace

void score_codes_scalar(const ScoreCodesArgs& a) {
  const size_t part_bytes = code_part_bytes(a.bits, a.words);
  for (uint32_t h = 0; h < a.group; ++h) a.maxima[h] = kMinusInf;
  if (a.widest != nullptr) *a.widest = 0.0F;
  for (uint32_t i = 0; i < 16 * a.tiles; ++i) {
    const std::byte* tile = a.codes + size_t{i / 16} * 128 * a.words;
    const float f = factor(a.factors, i, 0);
    if (a.widest != nullptr && f > *a.widest) *a.widest = f;
    for (uint32_t h = 0; h < a.group; ++h) {
      const int8_t* query = a.queries + h * kCodeParts * part_bytes;
      int32_t sum = product(a, tile, i % 16, query);
      if (a.parts == 2) sum = 256 * sum + product(a, tile, i % 16, query + part_bytes);
      const CodeQueryScale& q = a.scales[h].of[a.parts - 1];
      const float score = static_cast<float>(2 * sum - q.sum) * q.scale * f + a.offsets[h];
      const float x = log_weight(a.logits, score, f, a.noises[h]);
      a.scores[h * a.stride + i] = x;
      a.maxima[h] = x > a.maxima[h] ? x : a.maxima[h];
      if (a.floors == nullptr) continue;
      uint16_t& above = a.above[h * a.tiles + i / 16];
      const auto bit = static_cast<uint16_t>(x < a.floors[h] ? 0U : 1U << i % 16);
      above = static_cast<uint16_t>(i % 16 == 0 ? bit : above | bit);
    }
  }
}

void sum_codes_scalar(const SumCodesArgs& a) {
  const uint32_t rows = 16 * a.tiles;
  const float most = a.parts == 1 ? 255.0F : 65535.0F;
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
    const float unit = largest > kMinWeight ? largest / most : 0.0F;
    const float inverse = largest > kMinWeight ? most / largest : 0.0F;
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
