// Codes of keys and values (cpu/code_kernels.h) on vectors. V is a level's struct of integer operations; V::Float that
// of its fp32 operations.
//
// SCORES. The words of row r of a tile and of row r + 8 lie together, those of row r at even places: a pair. A shift
// and a mask make a vector of 8-bit codes, which is multiplied with the query's bytes in the same order; what is left
// is a sum over the even and over the odd places.
// VALUES. A shift and a mask make a vector of 16-bit codes whose two halves are rows 2p and 2p + 1 of one component;
// they are multiplied with the two rows' weights. Words of the same place in all tiles add up in registers, in an
// outer loop over places: 32 sums of 16 for d = 128 with 2 bits, which stay in the order of the codes until the end.
#pragma once

#include "cpu/code_kernels.h"
#include "cpu/simd/polynomials.h"

namespace keyhole::cpu {
namespace {

/// Asks for the share `part` of `parts` of the memory that will be read next.
[[gnu::always_inline]] inline void prefetch_share(const std::byte* ahead, size_t bytes,
                                                  uint32_t part, uint32_t parts) {
  if (ahead == nullptr) return;
  const size_t lines = (bytes + 63) / 64;
  for (size_t i = lines * part / parts; i < lines * (part + 1) / parts; ++i) {
    __builtin_prefetch(ahead + i * 64);
  }
}

template <class V, uint32_t kBits, uint32_t kWords>
void score_codes_of(const ScoreCodesArgs& a) {
  using F = typename V::Float::F;
  using I = typename V::I;
  constexpr uint32_t kShifts = 8 / kBits;
  // Vectors of a pair, or pairs of a vector; a unit is whatever is more.
  constexpr uint32_t kVectors = 4 * kWords > V::kWords ? 4 * kWords / V::kWords : 1;
  constexpr uint32_t kPairs = 4 * kWords < V::kWords ? V::kWords / (4 * kWords) : 1;
  constexpr uint32_t kUnits = 8 / kPairs;
  constexpr uint32_t kSteps = kShifts * kVectors;
  constexpr size_t kQueryBytes = size_t{32} * kShifts * kWords;
  constexpr uint32_t kMask = ((1U << kBits) - 1) * 0x01010101U;
  static_assert(kVectors * V::kWords == 4 * kWords * kPairs);
  I products[kMaxGroup][kUnits];
  for (uint32_t t = 0; t < a.tiles; ++t) {
    const std::byte* tile = a.codes + size_t{t} * 128 * kWords;
    prefetch_share(a.ahead, a.ahead_bytes, t, a.tiles);
    for (uint32_t unit = 0; unit < kUnits; unit += 2) {
      I u[2][kSteps];
#pragma GCC unroll 2
      for (uint32_t i = 0; i < 2; ++i) {
#pragma GCC unroll 8
        for (uint32_t v = 0; v < kVectors; ++v) {
          I x = V::load(tile + ((unit + i) * kVectors + v) * sizeof(I));
#pragma GCC unroll 8
          for (uint32_t s = 0; s < kShifts; ++s) {
            u[i][s * kVectors + v] = V::mask(x, kMask);
            x = V::template shift_right<kBits>(x);
          }
        }
      }
      for (uint32_t h = 0; h < a.group; ++h) {
        const int8_t* q = a.queries + h * kQueryBytes;
        // Four chains of products side by side: each waits four cycles for every step.
        I high[2] = {V::zero(), V::zero()};
        I low[2] = {V::zero(), V::zero()};
        V::template add_products<kSteps, kPairs>(u, q, high);
        V::template add_products<kSteps, kPairs>(u, q + kQueryBytes / 2, low);
        products[h][unit] = V::add(V::template shift_left<8>(high[0]), low[0]);
        products[h][unit + 1] = V::add(V::template shift_left<8>(high[1]), low[1]);
      }
    }
    F factors[16 / V::kWords];
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 16 / V::kWords; ++i) {
      factors[i] = V::template load_factors<0>(a.factors + size_t{t} * 64 + i * sizeof(I));
    }
    for (uint32_t h = 0; h < a.group; ++h) {
      I rows[16 / V::kWords];
      V::template sum_rows<kPairs>(products[h], rows);
      const I sum = V::set1(a.parts[h].sum);
      const F scale = V::Float::set1(a.parts[h].scale);
      const F offset = V::Float::set1(a.offsets[h]);
#pragma GCC unroll 2
      for (uint32_t i = 0; i < 16 / V::kWords; ++i) {
        const F of_levels =
            V::Float::mul(V::to_f32(V::sub(V::template shift_left<1>(rows[i]), sum)), scale);
        V::Float::store_f32(a.scores + h * a.stride + t * 16 + i * V::kWords,
                            V::Float::fma(of_levels, factors[i], offset));
      }
    }
  }
}

template <class V>
void weigh_codes(const WeighCodesArgs& a) {
  using S = typename V::Float;
  using F = typename S::F;
  const F scale = S::set1(a.logits.scale);
  const F one = S::set1(1.0F);
  for (uint32_t h = 0; h < a.group; ++h) {
    const F noise = S::set1(0.5F * a.noises[h]);
    F top = S::set1(kMinusInf);
    for (uint32_t i = 0; i < 16 * a.tiles; i += V::kWords) {
      float* at = a.scores + h * a.stride + i;
      F logit = S::mul(S::load_f32(at), scale);
      F slope = scale;
      if (a.logits.softcap > 0.0F) {
        const F cap = S::set1(a.logits.softcap);
        const F share = tanh<S>(S::div(logit, cap));
        logit = S::mul(cap, share);
        slope = S::mul(slope, S::fnma(share, share, one));
      }
      const F spread = S::mul(slope, V::template load_factors<0>(a.factors + i * size_t{4}));
      const F x = S::fnma(S::mul(spread, spread), noise, logit);
      S::store_f32(at, x);
      top = S::max(x, top);
    }
    a.maxima[h] = S::reduce_max(top);
  }
}

/// Weights of the rows of one call, rounded to 15 bits of the largest.
struct RoundedWeights {
  float unit = 0.0F;  ///< what 1 is worth
  alignas(64) int16_t rows[kCodeBlock];
};

/// Of head h. Its sums' last element is the sum of what the weights have been rounded to.
template <class V>
[[gnu::always_inline]] inline void round_weights(const SumCodesArgs& a, uint32_t h,
                                                 RoundedWeights& out) {
  using S = typename V::Float;
  using F = typename S::F;
  alignas(64) float weights[kCodeBlock];
  const F top = S::set1(a.tops[h]);
  F sum = S::zero();
  F most = S::zero();
  for (uint32_t i = 0; i < 16 * a.tiles; i += V::kWords) {
    const F w = softmax_weight<S>(S::sub(S::load_f32(a.log_weights + h * a.stride + i), top));
    sum = S::add(sum, w);
    const F of_value = S::mul(w, V::template load_factors<1>(a.factors + i * size_t{4}));
    most = S::max(of_value, most);
    S::store_f32(weights + i, of_value);
  }
  a.weight_sums[h] = S::reduce_add(sum);
  if (a.bits == 0) return;
  const float largest = S::reduce_max(most);
  const bool some = largest > 1e-30F;  // its inverse is finite
  out.unit = some ? largest / 32767.0F : 0.0F;
  const F inverse = S::set1(some ? 32767.0F / largest : 0.0F);
  F rounded_sum = S::zero();  // of integers below 2^24: exact
  for (uint32_t i = 0; i < 16 * a.tiles; i += V::kWords) {
    const F rounded = S::round(S::mul(S::load_f32(weights + i), inverse));
    rounded_sum = S::add(rounded_sum, rounded);
    V::store_i16(out.rows + i, rounded);
  }
  float* rest = a.sums + (h + 1) * a.sum_size - 16;
  rest[0] = rest[0] * a.rescales[h] + S::reduce_add(rounded_sum) * out.unit;
}

/// The most vectors after which the lanes of a tile's words are those of the first again: 5 of 16 words for 20 of a
/// lane class, 8 of 8 words for 64.
template <class V>
constexpr uint32_t kMostPeriod = V::kWords == 16 ? 5 : 8;

template <class V, uint32_t kBits, uint32_t kHeads>
void sum_codes_of_heads(const SumCodesArgs& a, uint32_t first_head, bool prefetches) {
  using F = typename V::Float::F;
  using I = typename V::I;
  constexpr uint32_t kSlots = 16 / kBits;
  constexpr uint32_t kMask = ((1U << kBits) - 1) * 0x00010001U;
  const uint32_t vectors = 32 * a.words / V::kWords;
  uint32_t period = 1;
  while (period * V::kWords % (4 * a.words) != 0) ++period;

  // The weights of row pairs, in the order of the words: [tile][rows 0-7, 8-15][period][head].
  I weights[kCodeTiles * 2 * kMostPeriod<V> * kHeads];
  float units[kHeads];
  for (uint32_t h = 0; h < kHeads; ++h) {
    RoundedWeights rounded;
    round_weights<V>(a, first_head + h, rounded);
    units[h] = rounded.unit;
    for (uint32_t p = 0; p < period; ++p) {
      alignas(64) uint32_t pairs[V::kWords];
      for (uint32_t i = 0; i < V::kWords; ++i) pairs[i] = (p * V::kWords + i) / a.words % 4;
      const I order = V::load(reinterpret_cast<const std::byte*>(pairs));
      for (uint32_t t = 0; t < 2 * a.tiles; ++t) {
        weights[(t * period + p) * kHeads + h] = V::pick_pairs(rounded.rows + size_t{8} * t, order);
      }
    }
  }
  uint32_t place = 0;
  for (uint32_t z = 0; z < vectors; ++z) {
    if (prefetches) prefetch_share(a.ahead, a.ahead_bytes, z, vectors);
    I sums[kSlots / 2][kHeads];
#pragma GCC unroll 8
    for (uint32_t k = 0; k < kSlots / 2; ++k) {
#pragma GCC unroll 4
      for (uint32_t h = 0; h < kHeads; ++h) sums[k][h] = V::zero();
    }
    for (uint32_t t = 0; t < a.tiles; ++t) {
      I x = V::load(a.codes + size_t{t} * 128 * a.words + z * sizeof(I));
      const I* of_rows = weights + (size_t{2} * t * period + place) * kHeads;
#pragma GCC unroll 16
      for (uint32_t s = 0; s < kSlots; ++s) {
        const I u = V::mask(x, kMask);
        x = V::template shift_right<kBits>(x);
        const I* w = of_rows + (s % 4 / 2 == 0 ? 0 : period * kHeads);
#pragma GCC unroll 4
        for (uint32_t h = 0; h < kHeads; ++h) {
          I& sum = sums[s / 4 * 2 + s % 2][h];
          sum = V::add_pairs(sum, u, w[h]);
        }
      }
    }
#pragma GCC unroll 4
    for (uint32_t h = 0; h < kHeads; ++h) {
      const F unit = V::Float::set1(units[h]);
      const F rescale = V::Float::set1(a.rescales[first_head + h]);
      float* out = a.sums + (first_head + h) * a.sum_size + size_t{z} * V::kWords;
#pragma GCC unroll 8
      for (uint32_t k = 0; k < kSlots / 2; ++k) {
        float* at = out + size_t{k} * 32 * a.words;
        V::Float::store_f32(at, V::Float::fma(V::to_f32(sums[k][h]), unit,
                                              V::Float::mul(V::Float::load_f32(at), rescale)));
      }
    }
    if (++place == period) place = 0;
  }
}

template <class V, uint32_t kBits>
void sum_codes_of(const SumCodesArgs& a) {
  constexpr uint32_t kMost = kBits == 1 ? 2 : 4;  // heads whose sums are in registers
  uint32_t h = 0;
  for (; h + kMost <= a.group; h += kMost) sum_codes_of_heads<V, kBits, kMost>(a, h, h == 0);
  if constexpr (kMost == 4) {
    if (a.group - h >= 2) {
      sum_codes_of_heads<V, kBits, 2>(a, h, h == 0);
      h += 2;
    }
  }
  if (h < a.group) sum_codes_of_heads<V, kBits, 1>(a, h, h == 0);
}

template <class V>
void sum_codes(const SumCodesArgs& a) {
  switch (a.bits) {
    case 1: return sum_codes_of<V, 1>(a);
    case 2: return sum_codes_of<V, 2>(a);
    case 4: return sum_codes_of<V, 4>(a);
    default: break;
  }
  RoundedWeights none;
  for (uint32_t h = 0; h < a.group; ++h) round_weights<V>(a, h, none);
}

/// Narrow: what takes shapes whose pairs do not fill V's vectors.
template <class V, class Narrow>
void score_codes(const ScoreCodesArgs& a) {
  switch (a.bits * 100 + a.words) {
    case 102: return score_codes_of<V, 1, 2>(a);
    case 104: return score_codes_of<V, 1, 4>(a);
    case 202: return score_codes_of<V, 2, 2>(a);
    case 204: return score_codes_of<V, 2, 4>(a);
    case 208: return score_codes_of<V, 2, 8>(a);
    case 404: return score_codes_of<V, 4, 4>(a);
    case 406: return score_codes_of<Narrow, 4, 6>(a);
    case 408: return score_codes_of<V, 4, 8>(a);
    case 416: return score_codes_of<V, 4, 16>(a);
    default: break;
  }
}

}  // namespace
}  // namespace keyhole::cpu
