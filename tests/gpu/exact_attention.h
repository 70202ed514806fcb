// Attention of one query in double precision, row by row.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "cpu/types.h"
#include "tests/relative_error.h"

namespace keyhole::gpu::test {

class ExactAttention {
 public:
  /// q `[dim]`, which it borrows.
  ExactAttention(const LogitParams& logits, const float* q, size_t dim)
      : logits_(logits), q_(q), sums_(dim) {}

  [[nodiscard]] double logit(const float* k) const {
    double x = 0;
    for (size_t j = 0; j < sums_.size(); ++j) x += double{q_[j]} * double{k[j]};
    x *= double{logits_.scale};
    const double cap = double{logits_.softcap};
    return cap > 0 ? cap * std::tanh(x / cap) : x;
  }
  void add(const float* k, const float* v) {
    const double w = weigh(logit(k));
    for (size_t j = 0; j < sums_.size(); ++j) sums_[j] += w * double{v[j]};
  }
  /// A learned sink, which has weight and no value.
  void add_sink(double sink) {
    if (sink != -INFINITY) (void)weigh(sink);
  }

  /// Whether nothing was added.
  [[nodiscard]] bool is_empty() const { return total_ == 0.0; }
  [[nodiscard]] double lse() const { return top_ + std::log(total_); }
  [[nodiscard]] std::vector<double> o() const {
    std::vector<double> o = sums_;
    for (double& x : o) x /= total_;
    return o;
  }

 private:
  /// The weight of a logit, beside the largest so far.
  double weigh(double x) {
    if (x > top_) {
      const double shrink = std::exp(top_ - x);
      for (double& y : sums_) y *= shrink;
      total_ *= shrink;
      top_ = x;
    }
    const double w = std::exp(x - top_);
    total_ += w;
    return w;
  }

  LogitParams logits_;
  const float* q_;
  std::vector<double> sums_;
  double top_ = -INFINITY, total_ = 0.0;
};

using keyhole::test::raise;
using keyhole::test::relative_error;

}  // namespace keyhole::gpu::test
