// Log weights of rows by the codes of their keys (ScoreCodesArgs) on vectors. V is a level's struct of integer
// operations, V::Float its struct of fp32 operations.
//
// The words of a tile are transposed in registers, once for all heads, so that a vector holds the same word of 16 (or
// 8) rows. A shift and a mask turn it into a vector of 8-bit codes, which is multiplied with four components of a
// query that are the same for all rows. So each lane adds up the score of one row, and nothing is summed over lanes.
#pragma once

#include "cpu/code_kernels.h"
#include "cpu/simd/polynomials.h"
#include "cpu/simd/prefetch_share.h"

namespace keyhole::cpu {
namespace {

/// The coefficients that turn the sum of one head's products into log weights:
///     f (2 unit (sum - half) + rest) + max(f^2 quadratic + offset, least),   least = offset - kMostNoiseBias,
/// but with a soft-cap the square comes after it.
struct HeadOfCodes {
  int32_t half;
  float unit2, rest, quadratic, offset, least;
};

/// The most words of a row that a call may have. kWords is their number where it is not 0, otherwise the call says
/// it: common head dimensions have instances of their own.
constexpr uint32_t kMostWords = 36;
template <uint32_t kWords>
constexpr uint32_t kPlaces = 2 * (kWords != 0 ? kWords : kMostWords);
template <uint32_t kWords>
constexpr uint32_t words_of(const ScoreCodesArgs& a) {
  return kWords != 0 ? kWords : a.words;
}

/// Sums of the products of `kHeads` queries with one vector's worth of rows of so many words, less their halves. x:
/// the words of the rows.
template <class V, uint32_t kBits, uint32_t kHeads, uint32_t kParts>
[[gnu::always_inline]] inline void multiply_codes(const typename V::I* x, uint32_t words,
                                                  const int8_t* queries, const HeadOfCodes* heads,
                                                  typename V::I (&out)[kHeads]) {
  using I = typename V::I;
  constexpr uint32_t kShifts = 8 / kBits;
  constexpr uint32_t kMask = ((1U << kBits) - 1) * 0x01010101U;
  constexpr size_t kWordBytes = code_part_bytes(kBits, 1);  // in one part of a query
  const size_t part_bytes = kWordBytes * words;
  const uint32_t positions = 2 * words;
  // Number of pairs of products whose sums fit 16 bits, where products add up in those.
  constexpr uint32_t kFit = 32767 / (((1U << kBits) - 1) * 128 * 2);
  const uint32_t run = V::kNarrow && positions * kShifts > kFit ? kFit / kShifts : positions;
  // Each head has two chains of sums, because one product waits for another for 4 or 5 cycles: one for each part, or
  // with one part one for even and one for odd shifts.
  I sums[kHeads][2];
#pragma GCC unroll 4
  for (uint32_t h = 0; h < kHeads; ++h) {
    sums[h][0] = V::zero();
    sums[h][1] = V::set1(-heads[h].half);
  }
  for (uint32_t begin = 0; begin < positions; begin += run) {
    I narrow[kHeads][2];  // in 16 bits
    if constexpr (V::kNarrow) {
#pragma GCC unroll 4
      for (uint32_t h = 0; h < kHeads; ++h) narrow[h][0] = narrow[h][1] = V::zero();
    }
    const uint32_t end = begin + run < positions ? begin + run : positions;
#pragma GCC unroll 1
    for (uint32_t p = begin; p < end; ++p) {
      const int8_t* q = queries + size_t{p} * kShifts * 4;
      I word = x[p];
#pragma GCC unroll 8
      for (uint32_t s = 0; s < kShifts; ++s) {
        const I u = V::mask(word, kMask);
        word = V::template shift_right<kBits>(word);
#pragma GCC unroll 4
        for (uint32_t h = 0; h < kHeads; ++h) {
#pragma GCC unroll 2
          for (uint32_t part = 0; part < kParts; ++part) {
            const uint32_t chain = kParts == 1 ? s % 2 : part;
            const int8_t* four = q + (h * kCodeParts + part) * part_bytes + s * 4;
            I& sum = V::kNarrow ? narrow[h][chain] : sums[h][chain];
            sum = V::add_products_of_four(sum, u, four);
          }
        }
      }
    }
    if constexpr (V::kNarrow) {
#pragma GCC unroll 4
      for (uint32_t h = 0; h < kHeads; ++h) {
        sums[h][0] = V::add(sums[h][0], V::widen(narrow[h][0]));
        sums[h][1] = V::add(sums[h][1], V::widen(narrow[h][1]));
      }
    }
  }
#pragma GCC unroll 4
  for (uint32_t h = 0; h < kHeads; ++h) {
    const I first = kParts == 1 ? sums[h][0] : V::template shift_left<8>(sums[h][0]);
    out[h] = V::add(first, sums[h][1]);
  }
}

/// Log weights of one tile for heads [first, first + kHeads).
template <class V, uint32_t kBits, uint32_t kWords, uint32_t kHeads, uint32_t kParts>
[[gnu::always_inline]] inline void score_heads(
    const ScoreCodesArgs& a, const HeadOfCodes* heads, uint32_t first, uint32_t tile,
    const typename V::I (&x)[16 / V::kWords][kPlaces<kWords>],
    const typename V::Float::F (&factors)[16 / V::kWords],
    const typename V::Float::F (&squares)[16 / V::kWords],
    typename V::Float::F (*tops)[16 / V::kWords]) {
  using S = typename V::Float;
  using F = typename S::F;
  using I = typename V::I;
  constexpr uint32_t kRows = 16 / V::kWords;
  constexpr size_t kWordBytes = kCodeParts * code_part_bytes(kBits, 1);  // of a query
  const size_t query_bytes = kWordBytes * words_of<kWords>(a);
  I products[kRows][kHeads];
#pragma GCC unroll 2
  for (uint32_t r = 0; r < kRows; ++r) {
    multiply_codes<V, kBits, kHeads, kParts>(
        x[r], words_of<kWords>(a), a.queries + first * query_bytes, heads + first, products[r]);
  }
#pragma GCC unroll 4
  for (uint32_t h = 0; h < kHeads; ++h) {
    const HeadOfCodes& head = heads[first + h];
    I rows[kRows];
#pragma GCC unroll 2
    for (uint32_t r = 0; r < kRows; ++r) rows[r] = products[r][h];
    V::in_row_order(rows);
    float* out = a.scores + (first + h) * a.stride + tile * 16;
#pragma GCC unroll 2
    for (uint32_t r = 0; r < kRows; ++r) {
      const F levels = S::fma(V::to_f32(rows[r]), S::set1(head.unit2), S::set1(head.rest));
      const F f = factors[r];
      F score;
      if (a.logits.softcap > 0.0F) {
        const F cap = S::set1(a.logits.softcap);
        const F share = tanh<S>(S::div(S::fma(f, levels, S::set1(head.offset)), cap));
        const F spread = S::mul(f, S::fnma(share, share, S::set1(1.0F)));
        const F bias = S::mul(S::mul(spread, spread), S::set1(head.quadratic));
        score = S::fma(cap, share, S::max(bias, S::set1(-kMostNoiseBias)));
      } else {
        const F less = S::fma(squares[r], S::set1(head.quadratic), S::set1(head.offset));
        score = S::fma(f, levels, S::max(less, S::set1(head.least)));
      }
      S::store_f32(out + r * V::kWords, score);
      tops[first + h][r] = S::max(score, tops[first + h][r]);
    }
  }
}

/// Writes a.maxima, a.floors and a.above. tops: the largest log weights of every 16th row.
template <class V>
void find_above(const ScoreCodesArgs& a, const typename V::Float::F (*tops)[16 / V::kWords]) {
  using S = typename V::Float;
  using F = typename S::F;
  constexpr uint32_t kRows = 16 / V::kWords;
  for (uint32_t h = 0; h < a.group; ++h) {
    F most = tops[h][0];
    F least = S::sub(S::zero(), tops[h][0]);
    if constexpr (kRows == 2) {
      most = S::max(most, tops[h][1]);
      least = S::max(least, S::sub(S::zero(), tops[h][1]));
    }
    a.maxima[h] = S::reduce_max(most);
    if (a.floors == nullptr) continue;
    const float sixteenth = -S::reduce_max(least);  // a value that 16 rows reach
    if (a.wanted <= 16 && sixteenth > a.floors[h]) a.floors[h] = sixteenth;
    const F floor = S::set1(a.floors[h]);
    for (uint32_t t = 0; t < a.tiles; ++t) {
      uint32_t below = 0;
#pragma GCC unroll 2
      for (uint32_t r = 0; r < kRows; ++r) {
        const float* at = a.scores + h * a.stride + t * 16 + r * V::kWords;
        below |= S::greater_lanes(floor, S::load_f32(at)) << (r * V::kWords);
      }
      a.above[h * a.tiles + t] = static_cast<uint16_t>(~below);
    }
  }
}

template <class V, uint32_t kBits, uint32_t kWords, uint32_t kParts>
void score_codes_of(const ScoreCodesArgs& a) {
  using S = typename V::Float;
  using F = typename S::F;
  using I = typename V::I;
  constexpr uint32_t kRows = 16 / V::kWords;
  HeadOfCodes heads[kMaxGroup];
  F tops[kMaxGroup][kRows];
  F widest = S::zero();
  for (uint32_t h = 0; h < a.group; ++h) {
    const CodeQueryScale& q = a.scales[h].of[kParts - 1];
    const float unit = q.scale * a.logits.scale;
    // 2 * products - sum is kept in integers as long as possible, because halves are not integers.
    const int32_t half = q.sum >> 1;
    const float offset = a.offsets[h] * a.logits.scale;
    heads[h] = {half,
                2.0F * unit,
                static_cast<float>(2 * half - q.sum) * unit,
                -0.5F * a.logits.scale * a.logits.scale * a.noises[h],
                offset,
                offset - kMostNoiseBias};
    for (uint32_t r = 0; r < kRows; ++r) tops[h][r] = S::set1(kMinusInf);
  }
  for (uint32_t t = 0; t < a.tiles; ++t) {
    prefetch_share(a.ahead, a.ahead_bytes, t, a.tiles);
    I x[kRows][kPlaces<kWords>];
    V::transpose(a.codes + size_t{t} * 128 * words_of<kWords>(a), words_of<kWords>(a), x);
    F factors[kRows], squares[kRows];
#pragma GCC unroll 2
    for (uint32_t r = 0; r < kRows; ++r) {
      factors[r] = V::template load_factors<0>(a.factors + size_t{t} * 64 + r * sizeof(I));
      squares[r] = S::mul(factors[r], factors[r]);
      widest = S::max(widest, factors[r]);
    }
    uint32_t h = 0;
    for (; h + 4 <= a.group; h += 4) {
      score_heads<V, kBits, kWords, 4, kParts>(a, heads, h, t, x, factors, squares, tops);
    }
    if (a.group - h >= 2) {
      score_heads<V, kBits, kWords, 2, kParts>(a, heads, h, t, x, factors, squares, tops);
      h += 2;
    }
    if (h < a.group)
      score_heads<V, kBits, kWords, 1, kParts>(a, heads, h, t, x, factors, squares, tops);
  }
  if (a.widest != nullptr) *a.widest = S::reduce_max(widest);
  find_above<V>(a, tops);
}

template <class V, uint32_t kParts>
void score_codes_in(const ScoreCodesArgs& a) {
  switch (a.bits * 100 + a.words) {
    case 102: return score_codes_of<V, 1, 2, kParts>(a);
    case 104: return score_codes_of<V, 1, 4, kParts>(a);
    case 202: return score_codes_of<V, 2, 2, kParts>(a);
    case 204: return score_codes_of<V, 2, 4, kParts>(a);
    case 208: return score_codes_of<V, 2, 8, kParts>(a);
    case 404: return score_codes_of<V, 4, 4, kParts>(a);
    case 406: return score_codes_of<V, 4, 6, kParts>(a);
    case 408: return score_codes_of<V, 4, 8, kParts>(a);
    case 416: return score_codes_of<V, 4, 16, kParts>(a);
    default: break;
  }
  switch (a.bits) {
    case 1: return score_codes_of<V, 1, 0, kParts>(a);
    case 2: return score_codes_of<V, 2, 0, kParts>(a);
    case 4: return score_codes_of<V, 4, 0, kParts>(a);
    default: break;
  }
}

template <class V>
void score_codes(const ScoreCodesArgs& a) {
  return a.parts == 1 ? score_codes_in<V, 1>(a) : score_codes_in<V, 2>(a);
}

}  // namespace
}  // namespace keyhole::cpu
