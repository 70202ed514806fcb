// e^x and tanh on vectors. S is a level's struct of vector operations.
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

/// e^x for |x| <= 80, else unspecified; a NaN stays one. Relative error below 2^-22.9 (1.1 ulp):
/// x = n ln 2 + r with |r| <= ln 2 / 2, e^r = 1 + r + r^2 q(r) with q minimax of degree 4 (error 2^-27).
template <class S>
[[gnu::always_inline]] inline typename S::F exp(typename S::F x) {
  using F = typename S::F;
  const F n = S::round(S::mul(x, S::set1(0x1.715476p0F)));  // 1 / ln 2
  // ln 2 in two parts: the first has 15 bits, so that n times it is exact.
  F r = S::fnma(n, S::set1(0x1.62e400p-1F), x);
  r = S::fnma(n, S::set1(0x1.7f7d1cp-20F), r);
  F q = S::set1(0x1.6d754cp-10F);
  q = S::fma(q, r, S::set1(0x1.120b72p-7F));
  q = S::fma(q, r, S::set1(0x1.5554b8p-5F));
  q = S::fma(q, r, S::set1(0x1.5554dcp-3F));
  q = S::fma(q, r, S::set1(0.5F));
  const F e = S::fma(S::mul(r, r), q, r);
  return S::times_power_of_two(S::add(e, S::set1(1.0F)), n);
}

/// Softmax weight of a logit that is x below the largest (x <= 0): e^x, and 0 below -60, which loses
/// nothing: 2^32 weights of e^-60 sum to 4e-17, fp32 resolves 6e-8. It keeps subnormals, which cost a
/// microcode assist each, out of the sums. A NaN stays one.
template <class S>
[[gnu::always_inline]] inline typename S::F softmax_weight(typename S::F x) {
  return S::less_select(x, S::set1(-60.0F), S::zero(), exp<S>(S::max(S::set1(-61.0F), x)));
}

/// tanh(x), relative error below 2^-22: an odd polynomial up to 0.625 (minimax of degree 11 in x, error
/// 2^-27), beyond it 1 - 2 / (e^2|x| + 1), which is 1 from 9.1 on.
template <class S>
[[gnu::always_inline]] inline typename S::F tanh(typename S::F x) {
  using F = typename S::F;
  const F magnitude = S::abs(x);
  const F x2 = S::mul(x, x);
  F p = S::set1(-0x1.75e1cep-8F);
  p = S::fma(p, x2, S::set1(0x1.52269cp-6F));
  p = S::fma(p, x2, S::set1(-0x1.b83c5ap-5F));
  p = S::fma(p, x2, S::set1(0x1.110726p-3F));
  p = S::fma(p, x2, S::set1(-0x1.555532p-2F));
  const F small = S::fma(S::mul(x, x2), p, x);
  const F clamped = S::min(S::set1(10.0F), magnitude);
  const F e = exp<S>(S::add(clamped, clamped));
  const F large = S::sub(S::set1(1.0F), S::div(S::set1(2.0F), S::add(e, S::set1(1.0F))));
  return S::less_select(magnitude, S::set1(0.625F), small, S::with_sign_of(large, x));
}

}  // namespace
}  // namespace keyhole::cpu
