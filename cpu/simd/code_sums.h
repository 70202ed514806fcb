// Weighted sums of the codes of values (SumCodesArgs) on vectors. V is a level's struct of integer operations,
// V::Float its struct of fp32 operations.
//
// A row of values lies over many words, and a word has two rows of some components. Bytes are put together so that a
// word holds one component of four rows, 8 bits each, and are multiplied with the rows' weights. Words of the same
// place in all tiles add up in registers, in an outer loop over places: 32 sums of 16 for d = 128 with 2 bits, which
// stay in the order of the codes until the end.
#pragma once

#include "cpu/code_kernels.h"
#include "cpu/simd/polynomials.h"
#include "cpu/simd/prefetch_share.h"

namespace keyhole::cpu {
namespace {

/// e^x for x <= 0 with a relative error below 2^-19, and 0 below -60. softmax_weight() is finer and takes four
/// operations more. e^x = 2^(n + r), |r| <= 1/2, 2^r minimax of degree 5 (error 2^-23); the rest of the error is that
/// of r.
template <class S>
[[gnu::always_inline]] inline typename S::F weight(typename S::F x) {
  using F = typename S::F;
  const F t = S::mul(S::max(S::set1(-61.0F), x), S::set1(0x1.715476p0F));  // 1 / ln 2
  const F n = S::round(t);
  const F r = S::sub(t, n);
  F p = S::set1(0x1.5c08e6p-10F);
  p = S::fma(p, r, S::set1(0x1.3d0c52p-7F));
  p = S::fma(p, r, S::set1(0x1.c6b6e4p-5F));
  p = S::fma(p, r, S::set1(0x1.ebf918p-3F));
  p = S::fma(p, r, S::set1(0x1.62e428p-1F));
  p = S::fma(p, r, S::set1(0x1.000002p0F));
  return S::less_select(x, S::set1(-60.0F), S::zero(), S::times_power_of_two(p, n));
}

/// The weights of the rows of one call, rounded to 8 or 16 bits of the largest.
struct RoundedWeights {
  float unit = 0.0F;  ///< what 1 is worth
  alignas(64) uint8_t parts[kCodeParts][kCodeBlock];
};

/// Rounds the weights of head h and writes the sum of the rounded weights to the last element of its sums. g: the
/// factors of the rows.
template <class V, uint32_t kParts>
[[gnu::always_inline]] inline void round_weights(const SumCodesArgs& a, uint32_t h, const float* g,
                                                 RoundedWeights& out) {
  using S = typename V::Float;
  using F = typename S::F;
  using I = typename V::I;
  constexpr float kMost = kParts == 1 ? 255.0F : 65535.0F;
  alignas(64) float weights[kCodeBlock];
  const F top = S::set1(a.tops[h]);
  F sum = S::zero();
  F most = S::zero();
  for (uint32_t i = 0; i < 16 * a.tiles; i += V::kWords) {
    const F w = weight<S>(S::sub(S::load_f32(a.log_weights + h * a.stride + i), top));
    sum = S::add(sum, w);
    const F of_value = S::mul(w, S::load_f32(g + i));
    most = S::max(of_value, most);
    S::store_f32(weights + i, of_value);
  }
  a.weight_sums[h] = S::reduce_add(sum);
  if (a.bits == 0) return;
  const float largest = S::reduce_max(most);
  const bool some = largest > 1e-30F;  // its inverse is finite
  out.unit = some ? largest / kMost : 0.0F;
  const F inverse = S::set1(some ? kMost / largest : 0.0F);
  I rounded_sum = V::zero();
  for (uint32_t i = 0; i < 16 * a.tiles; i += V::kWords) {
    const I rounded = V::to_i32(S::mul(S::load_f32(weights + i), inverse));
    rounded_sum = V::add(rounded_sum, rounded);
    V::store_low_bytes(out.parts[kParts - 1] + i, rounded);
    if constexpr (kParts == 2) {
      V::store_low_bytes(out.parts[0] + i, V::template shift_right<8>(rounded));
    }
  }
  float* rest = a.sums + (h + 1) * a.sum_size - 16;
  rest[0] = rest[0] * a.rescales[h] + S::reduce_add(V::to_f32(rounded_sum)) * out.unit;
}

/// The factors g of all rows.
template <class V>
[[gnu::always_inline]] inline void load_value_factors(const SumCodesArgs& a, float* g) {
  for (uint32_t i = 0; i < 16 * a.tiles; i += V::kWords) {
    V::Float::store_f32(g + i, V::template load_factors<1>(a.factors + i * size_t{4}));
  }
}

/// Number of components in one word of values.
template <uint32_t kBits>
constexpr uint32_t kKinds = 8 / kBits;

/// Unpacks a word: [slots of row 2p, of two groups of 16 components][slots of row 2p + 1]; the slots of every second
/// pair belong to the rows + 8. out[k] is component k of rows 2p, 2p + 8, 2p + 1, 2p + 9, times kind_factor(k).
template <class V, uint32_t kBits>
[[gnu::always_inline]] inline void spread_codes(typename V::I x,
                                                typename V::I (&out)[kKinds<kBits>]) {
  using I = typename V::I;
  if constexpr (kBits == 4) {
    out[0] = V::mask(x, 0x0F0F0F0FU);
    out[1] = V::mask(V::template shift_right<4>(x), 0x0F0F0F0FU);
  } else {
    constexpr uint32_t kEven = 0x00FF00FFU;
    const I halves[2] = {
        V::select(kEven, x, V::template shift_left<8 - 2 * kBits>(x)),
        V::select(kEven, V::template shift_right<8>(x), V::template shift_right<2 * kBits>(x))};
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; ++i) {
      if constexpr (kBits == 2) {
        out[2 * i] = V::mask(halves[i], 0x03030303U);
        out[2 * i + 1] = V::mask(halves[i], 0x0C0C0C0CU);
      } else {
        out[4 * i] = V::mask(halves[i], 0x01010101U);
        out[4 * i + 1] = V::mask(halves[i], 0x02020202U);
        out[4 * i + 2] = V::mask(halves[i], 0x10101010U);
        out[4 * i + 3] = V::mask(halves[i], 0x20202020U);
      }
    }
  }
}
template <uint32_t kBits>
constexpr float kind_factor(uint32_t k) {
  constexpr float kOne[] = {1.0F, 2.0F, 16.0F, 32.0F};
  return kBits == 4 ? 1.0F : kBits == 2 ? (k % 2 == 0 ? 1.0F : 4.0F) : kOne[k % 4];
}

/// The longest period after which the lanes of a tile's words repeat, in vectors: 35 for 35 words of a lane.
constexpr uint32_t kMostPeriod = 35;
/// The longest period for which all weights are kept, in vectors: 5 vectors of 16 words for 20 words of a lane class,
/// 8 vectors of 8 words for 64.
template <class V>
constexpr uint32_t kMostKept = V::kWords == 16 ? 5 : 8;

template <class V, uint32_t kBits, uint32_t kHeads, uint32_t kParts>
void sum_codes_of_heads(const SumCodesArgs& a, uint32_t first_head, bool prefetches) {
  using F = typename V::Float::F;
  using I = typename V::I;
  constexpr uint32_t kColumns = kHeads * kParts;
  const uint32_t vectors = 32 * a.words / V::kWords;
  uint32_t period = 1;
  while (period * V::kWords % (4 * a.words) != 0) ++period;

  // The weights of four rows at a time, in the order of the words: [tile][period][head][part], or, where the period
  // is long, one vector's after the other's.
  const uint32_t kept = period <= kMostKept<V> ? period : 1;
  I weights[kCodeTiles * kMostKept<V> * kColumns];
  float units[kHeads];
  I orders[kMostPeriod];
  for (uint32_t p = 0; p < period; ++p) {
    alignas(64) uint32_t fours[V::kWords];
    for (uint32_t i = 0; i < V::kWords; ++i) fours[i] = (p * V::kWords + i) / a.words % 4;
    orders[p] = V::load(reinterpret_cast<const std::byte*>(fours));
  }
  alignas(64) float g[kCodeBlock];
  load_value_factors<V>(a, g);
  RoundedWeights rounded[kHeads];
  const auto order_weights = [&](uint32_t place) {
    for (uint32_t h = 0; h < kHeads; ++h) {
      for (uint32_t part = 0; part < kParts; ++part) {
        for (uint32_t t = 0; t < a.tiles; ++t) {
          weights[(t * kept + (kept == period ? place : 0)) * kColumns + h * kParts + part] =
              V::weights_of_rows(rounded[h].parts[part] + size_t{16} * t, orders[place]);
        }
      }
    }
  };
  for (uint32_t h = 0; h < kHeads; ++h) {
    round_weights<V, kParts>(a, first_head + h, g, rounded[h]);
    units[h] = rounded[h].unit;
  }
  for (uint32_t p = 0; p < kept; ++p) order_weights(p);
  uint32_t place = 0;
  for (uint32_t z = 0; z < vectors; ++z) {
    if (prefetches) prefetch_share(a.ahead, a.ahead_bytes, z, vectors);
    if (kept != period && z != 0) order_weights(place);
    I sums[kKinds<kBits>][kColumns];
#pragma GCC unroll 8
    for (uint32_t k = 0; k < kKinds<kBits>; ++k) {
#pragma GCC unroll 8
      for (uint32_t c = 0; c < kColumns; ++c) sums[k][c] = V::zero();
    }
    const I* const first = weights + (kept == period ? place : 0) * kColumns;
    for (uint32_t t = 0; t < a.tiles; ++t) {
      I u[kKinds<kBits>];
      spread_codes<V, kBits>(V::load(a.codes + size_t{t} * 128 * a.words + z * sizeof(I)), u);
      const I* w = first + size_t{t} * kept * kColumns;
#pragma GCC unroll 8
      for (uint32_t c = 0; c < kColumns; ++c) {
        const I of_rows = w[c];
#pragma GCC unroll 8
        for (uint32_t k = 0; k < kKinds<kBits>; ++k) {
          sums[k][c] = V::add_products(sums[k][c], of_rows, u[k]);
        }
      }
    }
#pragma GCC unroll 4
    for (uint32_t h = 0; h < kHeads; ++h) {
      const F rescale = V::Float::set1(a.rescales[first_head + h]);
      float* out = a.sums + (first_head + h) * a.sum_size + size_t{z} * V::kWords;
#pragma GCC unroll 8
      for (uint32_t k = 0; k < kKinds<kBits>; ++k) {
        const F unit = V::Float::set1(units[h] * (1.0F / kind_factor<kBits>(k)));
        I sum = sums[k][h * kParts];
        if constexpr (kParts == 2) {
          sum = V::add(V::template shift_left<8>(sum), sums[k][h * kParts + 1]);
        }
        float* at = out + size_t{k} * 32 * a.words;
        V::Float::store_f32(at, V::Float::fma(V::to_f32(sum), unit,
                                              V::Float::mul(V::Float::load_f32(at), rescale)));
      }
    }
    if (++place == period) place = 0;
  }
}

template <class V, uint32_t kBits, uint32_t kParts>
void sum_codes_of(const SumCodesArgs& a) {
  // The number of heads whose sums fit the registers.
  constexpr uint32_t kFit = V::kSums / (kKinds<kBits> * kParts);
  constexpr uint32_t kMost = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  uint32_t h = 0;
  for (; h + kMost <= a.group; h += kMost) {
    sum_codes_of_heads<V, kBits, kMost, kParts>(a, h, h == 0);
  }
  if constexpr (kMost == 4) {
    if (a.group - h >= 2) {
      sum_codes_of_heads<V, kBits, 2, kParts>(a, h, h == 0);
      h += 2;
    }
  }
  if constexpr (kMost > 1) {
    if (h < a.group) sum_codes_of_heads<V, kBits, 1, kParts>(a, h, h == 0);
  }
}

template <class V, uint32_t kParts>
void sum_codes_in(const SumCodesArgs& a) {
  switch (a.bits) {
    case 1: return sum_codes_of<V, 1, kParts>(a);
    case 2: return sum_codes_of<V, 2, kParts>(a);
    case 4: return sum_codes_of<V, 4, kParts>(a);
    default: break;
  }
  RoundedWeights none;
  alignas(64) float g[kCodeBlock];
  load_value_factors<V>(a, g);
  for (uint32_t h = 0; h < a.group; ++h) round_weights<V, kParts>(a, h, g, none);
}

template <class V>
void sum_codes(const SumCodesArgs& a) {
  return a.parts == 1 ? sum_codes_in<V, 1>(a) : sum_codes_in<V, 2>(a);
}

}  // namespace
}  // namespace keyhole::cpu
