// Kernels::attend for every level: partial attention of a group with an online softmax.
//
// Rows are taken in blocks of kBlock. Per block: inner products of all heads (dot.h), softmax weights with
// the running maximum, then the weighted sum of V. A block's K and V stay in L1 (fp16, d = 128: 16 KiB
// each), so every row comes from memory once for the whole group.
#pragma once

#include "cpu/levels.h"
#include "cpu/simd/dot.h"
#include "cpu/simd/polynomials.h"

namespace keyhole::cpu {
namespace {

/// Online softmax of one head.
struct Running {
  float largest;  // largest logit so far
  float sum;      // sum of weights relative to it
  float rescale;  // factor by which the newest block multiplies all older weights
};

/// Turns n inner products into softmax weights in place (lanes up to kBlock are written).
template <class S>
[[gnu::noinline]] void weigh(float* w, size_t n, const LogitParams& p, Running& r) {
  using F = typename S::F;
  constexpr uint32_t kVectors = kBlock / S::kWidth;
  const F minus_inf = S::set1(kMinusInf);
  F x[kVectors];
  F top = S::set1(r.largest);
#pragma GCC unroll 8
  for (uint32_t v = 0; v < kVectors; ++v) {
    x[v] = S::mul(S::load_f32(w + v * S::kWidth), S::set1(p.scale));
    if (p.softcap > 0.0F) {
      const F cap = S::set1(p.softcap);
      x[v] = S::mul(cap, tanh<S>(S::div(x[v], cap)));
    }
    const size_t begin = v * S::kWidth;
    x[v] = S::first_lanes(x[v], minus_inf, n > begin ? n - begin : 0);
    top = S::max(top, x[v]);
  }
  const float largest = S::reduce_max(top);
  // -inf - largest gives 0 for the first block; equal maxima give 1.
  r.rescale = S::first(softmax_weight<S>(S::set1(r.largest - largest)));
  F sum = S::zero();
#pragma GCC unroll 8
  for (uint32_t v = 0; v < kVectors; ++v) {
    const F weight = softmax_weight<S>(S::sub(x[v], S::set1(largest)));
    S::store_f32(w + v * S::kWidth, weight);
    sum = S::add(sum, weight);
  }
  r.sum = r.sum * r.rescale + S::reduce_add(sum);
  r.largest = largest;
}

/// The weighted sum of a block: weights `[heads, kBlock]`, running maxima, state o `[heads, dim]`.
struct Sum {
  const std::byte* const* rows;   // n + kNearValues readable ones, see RowBlocks::current()
  const std::byte* const* ahead;  // rows for the far prefetch, one for each row
  size_t n;
  uint32_t dim;
  const float* weights;
  const Running* running;
  float* o;
  const uint16_t* const* scales = nullptr;  // of int8 rows, as many as rows
};

/// o[h] = o[h]*rescale[h] + sum over n rows of w[h]*row, for `heads` heads and `vectors` vectors of the
/// row, starting at element j.
template <class S, DType T, uint32_t heads, uint32_t vectors>
[[gnu::noinline]] void sum_tile(const Sum& s, uint32_t j) {
  using F = typename S::F;
  constexpr size_t kTileBytes = vectors * S::kWidth * kElementSize<T>;
  const std::byte* const* rows = s.rows;
  const std::byte* const* ahead = s.ahead;
  const float* weights = s.weights;
  F acc[heads][vectors];
#pragma GCC unroll 4
  for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (uint32_t v = 0; v < vectors; ++v) acc[h][v] = S::zero();
  }
#pragma GCC unroll 1
  for (size_t i = 0; i < s.n; ++i) {
#pragma GCC unroll 8
    for (size_t offset = 0; offset < kTileBytes; offset += kCacheLine) {
      prefetch_far(ahead[i] + j * kElementSize<T> + offset);
      prefetch_near(rows[i + kNearValues] + j * kElementSize<T> + offset);
    }
    if (kTileBytes > kCacheLine && kTileBytes % kCacheLine != 0) {  // d = 80, 96: never on lines
      prefetch_far(ahead[i] + (j * kElementSize<T> + kTileBytes - 1));
    }
    const std::byte* value = rows[i] + j * kElementSize<T>;
    F weight[heads];
#pragma GCC unroll 4
    for (uint32_t h = 0; h < heads; ++h) weight[h] = S::set1(weights[h * kBlock + i]);
#pragma GCC unroll 8
    for (uint32_t v = 0; v < vectors; ++v) {
      const F x = load_elements<S, T>(value + v * S::kWidth * kElementSize<T>,
                                      T == DType::i8 ? s.scales[i] + j + v * S::kWidth : nullptr);
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) acc[h][v] = S::fma(x, weight[h], acc[h][v]);
    }
  }
#pragma GCC unroll 4
  for (uint32_t h = 0; h < heads; ++h) {
    const F rescale = S::set1(s.running[h].rescale);
#pragma GCC unroll 8
    for (uint32_t v = 0; v < vectors; ++v) {
      float* out = s.o + h * s.dim + j + v * S::kWidth;
      S::store_f32(out, S::fma(S::load_f32(out), rescale, acc[h][v]));
    }
  }
}

template <class S, DType T, uint32_t heads>
[[gnu::always_inline]] inline void sum_heads(const Sum& s) {
  uint32_t j = 0;
  if constexpr (S::kMaxValueVectors >= 6) {
    // Vectors are taken in fours. One or two that are left over are taken with the last four.
    const uint32_t vectors = s.dim / S::kWidth;  // 4 to 36
    const uint32_t last = vectors % 4 == 1 || vectors % 4 == 2 ? 4 + vectors % 4 : vectors % 4;
    for (; j < (vectors - last) * S::kWidth; j += 4 * S::kWidth) sum_tile<S, T, heads, 4>(s, j);
    if (last == 5) return sum_tile<S, T, heads, 5>(s, j);
    if (last == 6) return sum_tile<S, T, heads, 6>(s, j);
    if (last == 3) return sum_tile<S, T, heads, 3>(s, j);
  } else {
    for (; j < s.dim; j += 2 * S::kWidth) sum_tile<S, T, heads, 2>(s, j);
  }
}

/// o = o*rescale + weights * rows for the whole group, four heads at a time.
template <class S, DType T>
[[gnu::always_inline]] inline void sum_block(Sum s, uint32_t group) {
  for (; group >= 4; group -= 4) {
    sum_heads<S, T, 4>(s);
    s.weights += 4 * kBlock;
    s.running += 4;
    s.o += 4 * s.dim;
  }
  switch (group) {
    case 3: return sum_heads<S, T, 3>(s);
    case 2: return sum_heads<S, T, 2>(s);
    case 1: return sum_heads<S, T, 1>(s);
    default: return;
  }
}

/// Divides o by the sums of weights and writes lse; returns false if an fp32 sum has overflowed on the way.
template <class S, class Args>
bool normalise(const Args& a, const Running* running) {
  using F = typename S::F;
  const uint32_t dim = a.values.dim;
  bool finite = true;
  for (uint32_t h = 0; h < a.group; ++h) {
    a.lse[h] = running[h].largest + __builtin_logf(running[h].sum);  // empty: -inf + -inf
    const F inverse = S::set1(running[h].sum > 0.0F ? 1.0F / running[h].sum : 0.0F);
    F check = S::set1(a.lse[h]);
    check = S::sub(check, check);  // 0, or NaN from Inf and NaN
    for (uint32_t j = 0; j < dim; j += S::kWidth) {
      const F o = S::mul(S::load_f32(a.o + h * dim + j), inverse);
      S::store_f32(a.o + h * dim + j, o);
      check = S::add(check, S::sub(o, o));
    }
    finite = finite && S::reduce_add(check) == 0.0F;
  }
  return finite;
}

template <class S, DType T>
void attend(const AttendArgs& a) {
  constexpr size_t kPanel = S::kWidth;
  const uint32_t dim = a.keys.dim;
  RowBlocks keys(rows_of<T>(a.keys, a.ids, a.count), dim * kElementSize<T>);
  RowBlocks values(rows_of<T>(a.values, a.ids, a.count), dim * kElementSize<T>);
  alignas(64) float weights[kMaxGroup * kBlock];
  Running running[kMaxGroup];
  for (uint32_t h = 0; h < a.group; ++h) running[h] = {kMinusInf, 0.0F, 0.0F};
  for (size_t i = 0; i < a.group * kBlock; ++i) weights[i] = 0.0F;
  for (size_t i = 0; i < size_t{a.group} * dim; ++i) a.o[i] = 0.0F;

  keys.prefetch_first();
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    const size_t n = a.count - begin < kBlock ? a.count - begin : kBlock;
    keys.advance(begin);
    values.advance(begin);
    // While the keys are scored, this block's values are fetched; while the values are summed, the next block's keys.
    for (size_t i = 0; i < n; i += kPanel) {
      dot_panel<S, T>(
          {keys.current() + i, values.current() + i, values.tails, n - i < kPanel ? n - i : kPanel,
           dim, weights + i, kBlock, keys.scales() + i},
          a.queries, a.group);
    }
    for (uint32_t h = 0; h < a.group; ++h) weigh<S>(weights + h * kBlock, n, a.logits, running[h]);
    sum_block<S, T>({values.current(), keys.has_next ? keys.next() : values.current(), n, dim,
                     weights, running, a.o, values.scales()},
                    a.group);
  }
  if (!normalise<S>(a, running) && a.count > 0) attend_in_double(a, T);
}

}  // namespace
}  // namespace keyhole::cpu
