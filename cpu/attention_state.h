// The arithmetic behind attention states (cpu/types.h), each in one place: the logit of an inner product, and
// ln of a sum of exponentials. T is float or double; both follow the same operations in the same order, so that
// results have the same bits wherever they are computed.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/types.h"

namespace keyhole::cpu {

/// logit = scale*score, and with a soft-cap c > 0: logit = c * tanh(scale*score / c).
template <class T>
[[nodiscard]] T logit_of(T score, const LogitParams& p) {
  const T x = score * static_cast<T>(p.scale);
  const T cap = static_cast<T>(p.softcap);
  return cap > T{0} ? cap * std::tanh(x / cap) : x;
}

/// The inner product whose logit is `logit`, the inverse of logit_of(). A logit that the soft-cap never reaches
/// gives +-inf.
[[nodiscard]] inline float score_of(double logit, const LogitParams& p) {
  if (p.softcap > 0.0F) {
    const double share = logit / p.softcap;
    logit = share >= 1.0    ? std::numeric_limits<double>::infinity()
            : share <= -1.0 ? -std::numeric_limits<double>::infinity()
                            : p.softcap * std::atanh(share);
  }
  return static_cast<float>(logit / p.scale);
}

/// ln(e^a + e^b) = m + ln(e^(a-m) + e^(b-m)), m = max(a, b): the lse of two sets together.
/// Two empty sets give -inf; without the guard -inf - -inf would be NaN.
template <class T>
[[nodiscard]] T add_logs(T a, T b) {
  const T m = std::max(a, b);
  if (m == -std::numeric_limits<T>::infinity()) return m;
  return m + std::log(std::exp(a - m) + std::exp(b - m));
}

/// ln(sum of e^x) of many x, in two passes over them: first cover(x) for all, then add(x) for all.
///   largest = max x                          -inf: all sets are empty
///   sum     = sum of e^(x - largest)         from 1 to their number, so that it cannot overflow
template <class T>
struct LogSum {
  T largest = -std::numeric_limits<T>::infinity();
  T sum = T{0};

  [[nodiscard]] bool is_empty() const { return largest == -std::numeric_limits<T>::infinity(); }
  void cover(T x) { largest = std::max(largest, x); }
  /// Adds e^x to the sum. Where all sets are empty it adds nothing: -inf - -inf would be NaN.
  void add(T x) {
    if (!is_empty()) sum += std::exp(x - largest);
  }
  /// largest + ln(sum); -inf where all is empty.
  [[nodiscard]] T value() const { return is_empty() ? largest : largest + std::log(sum); }
  /// e^(x - value()): the share of one x in the sum. Not for an empty sum.
  [[nodiscard]] T share(T x) const { return std::exp(x - largest) / sum; }
};

}  // namespace keyhole::cpu
