// Products of matrices in cache, and the softmax of their rows.
#pragma once

#include "cpu/simd/polynomials.h"

namespace keyhole::cpu {
namespace {

/// Computes `rows` rows by `vectors` vectors of C from element (i, j) on, held in registers while k runs.
template <class S, uint32_t rows, uint32_t vectors>
[[gnu::noinline]] void product_tile(const ProductArgs& p, uint32_t i, uint32_t j) {
  using F = typename S::F;
  F acc[rows][vectors];
  float* const c = p.c + i * p.c_stride + j;
#pragma GCC unroll 6
  for (uint32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (uint32_t v = 0; v < vectors; ++v) {
      acc[r][v] = p.adds ? S::load_f32(c + r * p.c_stride + v * S::kWidth) : S::zero();
    }
  }
  const float* a = p.a + i * p.a_stride;
  const float* b = p.b + j;
#pragma GCC unroll 1
  for (uint32_t l = 0; l < p.k; ++l) {
    F x[vectors];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < vectors; ++v) x[v] = S::load_f32(b + v * S::kWidth);
#pragma GCC unroll 6
    for (uint32_t r = 0; r < rows; ++r) {
      const F w = S::set1(a[r * p.a_stride]);
#pragma GCC unroll 4
      for (uint32_t v = 0; v < vectors; ++v) acc[r][v] = S::fma(w, x[v], acc[r][v]);
    }
    ++a;
    b += p.b_stride;
  }
#pragma GCC unroll 6
  for (uint32_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (uint32_t v = 0; v < vectors; ++v) {
      S::store_f32(c + r * p.c_stride + v * S::kWidth, acc[r][v]);
    }
  }
}

template <class S, uint32_t vectors>
void product_columns(const ProductArgs& p, uint32_t j) {
  uint32_t i = 0;
  for (; i + 6 <= p.m; i += 6) product_tile<S, 6, vectors>(p, i, j);
  for (; i + 2 <= p.m; i += 2) product_tile<S, 2, vectors>(p, i, j);
  if (i < p.m) product_tile<S, 1, vectors>(p, i, j);
}

template <class S>
void product(const ProductArgs& p) {
  // 32 registers of 16 lanes hold 6 x 4 sums, the loaded vectors and a broadcast; 16 of 8 lanes hold 6 x 2.
  constexpr uint32_t kVectors = S::kWidth == 16 ? 4 : 2;
  uint32_t j = 0;
  for (; j + kVectors * S::kWidth <= p.n; j += kVectors * S::kWidth) {
    product_columns<S, kVectors>(p, j);
  }
  // n is a multiple of 16: of 8 lanes nothing is left, of 16 up to three vectors.
  if constexpr (kVectors == 4) {
    for (; j + 2 * S::kWidth <= p.n; j += 2 * S::kWidth) product_columns<S, 2>(p, j);
    for (; j < p.n; j += S::kWidth) product_columns<S, 1>(p, j);
  }
}

template <class S>
void weigh_row(const WeighRowArgs& a) {
  using F = typename S::F;
  constexpr uint32_t kVectors = kPromptRows / S::kWidth;
  const F minus_inf = S::set1(kMinusInf);
  F x[kVectors];
  F top = S::set1(*a.largest);
#pragma GCC unroll 8
  for (uint32_t v = 0; v < kVectors; ++v) {
    x[v] = S::load_f32(a.x + v * S::kWidth);
    if (a.softcap > 0.0F) {
      const F cap = S::set1(a.softcap);
      x[v] = S::mul(cap, tanh<S>(S::div(x[v], cap)));
    }
    const uint32_t begin = v * S::kWidth;
    if (a.to < begin + S::kWidth) {
      x[v] = S::first_lanes(x[v], minus_inf, a.to > begin ? a.to - begin : 0);
    }
    if (a.from > begin) x[v] = S::first_lanes(minus_inf, x[v], a.from - begin);
    top = S::max(top, x[v]);
  }
  const float largest = S::reduce_max(top);
  if (largest == kMinusInf && a.to <= a.from) {  // nothing is seen here, nor was before
    for (uint32_t v = 0; v < kVectors; ++v) S::store_f32(a.x + v * S::kWidth, S::zero());
    return;
  }
  F sum = S::zero();
#pragma GCC unroll 8
  for (uint32_t v = 0; v < kVectors; ++v) {
    const F weight = softmax_weight<S>(S::sub(x[v], S::set1(largest)));
    S::store_f32(a.x + v * S::kWidth, weight);
    sum = S::add(sum, weight);
  }
  // -inf - largest gives 0 for the first block; equal maxima give 1.
  const float rescale = S::first(softmax_weight<S>(S::set1(*a.largest - largest)));
  *a.sum = *a.sum * rescale + S::reduce_add(sum);
  *a.largest = largest;
  if (rescale == 1.0F) return;
  const F factor = S::set1(rescale);
  for (uint32_t j = 0; j < a.dim; j += S::kWidth) {
    S::store_f32(a.o + j, S::mul(S::load_f32(a.o + j), factor));
  }
}

}  // namespace
}  // namespace keyhole::cpu
