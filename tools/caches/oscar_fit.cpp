#include "tools/caches/oscar_fit.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tools/caches/symmetric_eigen.h"

namespace keyhole::tools {
namespace {

constexpr size_t kMostPositions = 256;
constexpr size_t kMostRows = 512;
constexpr std::array<float, 6> kQuantiles = {1.0F, 0.98F, 0.96F, 0.94F, 0.92F, 0.9F};

/// `count` of 0..n-1, evenly spread, the last among them.
std::vector<size_t> spread(size_t n, size_t count) {
  std::vector<size_t> out;
  const size_t m = std::min(n, count);
  for (size_t i = 0; i < m; ++i) out.push_back((i + 1) * n / m - 1);
  return out;
}

/// Eight sums side by side, so that a compiler may use vectors.
float product(const float* a, const float* b, size_t n) {
  float sums[8] = {};
  for (size_t i = 0; i + 8 <= n; i += 8) {
    for (size_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  float sum = 0.0F;
  for (const float s : sums) sum += s;
  return sum;
}

void add_square(const float* x, size_t dim, std::vector<double>& sum) {
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) sum[i * dim + j] += double{x[i]} * x[j];
  }
}

/// Sums over the queries of a sample.
struct Consumed {
  std::vector<double> queries, outputs;  ///< `[dim, dim]`: of q q^T, of o o^T
  std::vector<double> weights;           ///< `[rows]`: of squared softmax weights
};

Consumed consumed_by(const OscarSample& s) {
  Consumed sum{std::vector<double>(s.dim * s.dim), std::vector<double>(s.dim * s.dim),
               std::vector<double>(s.rows)};
  std::vector<float> weights(s.rows), output(s.dim);
  for (const size_t i : spread(s.positions.size(), kMostPositions)) {
    const size_t seen = std::min<size_t>(s.positions[i] + size_t{1}, s.rows);
    for (size_t j = 0; j < s.group; ++j) {
      const float* q = s.queries + (i * s.group + j) * s.dim;
      float most = -INFINITY;
      for (size_t t = 0; t < seen; ++t) {
        const float logit = s.scale * product(q, s.keys + t * s.dim, s.dim);
        weights[t] = s.softcap > 0.0F ? s.softcap * std::tanh(logit / s.softcap) : logit;
        most = std::max(most, weights[t]);
      }
      double all = 0.0;
      for (size_t t = 0; t < seen; ++t) all += weights[t] = std::exp(weights[t] - most);
      std::fill(output.begin(), output.end(), 0.0F);
      for (size_t t = 0; t < seen; ++t) {
        const auto w = static_cast<float>(weights[t] / all);
        sum.weights[t] += double{w} * w;
        for (size_t c = 0; c < s.dim; ++c) output[c] += w * s.values[t * s.dim + c];
      }
      add_square(q, s.dim, sum.queries);
      add_square(output.data(), s.dim, sum.outputs);
    }
  }
  return sum;
}

/// e^T C e.
double in_metric(const std::vector<double>& c, const std::vector<double>& e) {
  const size_t dim = e.size();
  double sum = 0.0;
  for (size_t i = 0; i < dim; ++i) {
    double row = 0.0;
    for (size_t j = 0; j < dim; ++j) row += c[i * dim + j] * e[j];
    sum += e[i] * row;
  }
  return sum;
}

/// Sets the quantile of the least `error(row, e)`, summed over rows.
template <class Error>
void fit_quantile(const OscarSample& s, const float* rows, OscarTurn& turn, const Error& error) {
  double least = INFINITY;
  float best = 1.0F;
  std::vector<float> through(s.dim);
  std::vector<double> e(s.dim);
  for (const float quantile : kQuantiles) {
    turn.quantile = quantile;
    double sum = 0.0;
    for (const size_t t : spread(s.rows, kMostRows)) {
      const float* row = rows + t * s.dim;
      std::copy_n(row, s.dim, through.begin());
      pass_oscar(turn, through.data(), 1, s.dim);
      for (size_t c = 0; c < s.dim; ++c) e[c] = double{through[c]} - row[c];
      sum += error(t, e);
    }
    if (sum < least) {
      least = sum;
      best = quantile;
    }
  }
  turn.quantile = best;
}

}  // namespace

std::vector<float> oscar_rotation(const std::vector<double>& covariance, size_t dim) {
  const std::vector<double> u = symmetric_eigenvectors(covariance, dim);
  std::vector<float> uh(u.begin(), u.end());
  walsh_hadamard(uh.data(), uh.size(), static_cast<uint32_t>(dim));
  std::vector<float> rotation(dim * dim);
  for (size_t j = 0; j < dim; ++j) {
    size_t reversed = 0;
    for (size_t bit = 1, mirror = dim / 2; bit < dim; bit *= 2, mirror /= 2) {
      if ((j & bit) != 0) reversed |= mirror;
    }
    for (size_t i = 0; i < dim; ++i) rotation[i * dim + j] = uh[i * dim + reversed];
  }
  return rotation;
}

OscarHead fit_oscar(const OscarSample& sample) {
  const Consumed sums = consumed_by(sample);
  OscarHead head;
  head.keys.rotation = oscar_rotation(sums.queries, sample.dim);
  head.values.rotation = oscar_rotation(sums.outputs, sample.dim);
  fit_quantile(sample, sample.keys, head.keys,
               [&](size_t, const std::vector<double>& e) { return in_metric(sums.queries, e); });
  fit_quantile(sample, sample.values, head.values, [&](size_t row, const std::vector<double>& e) {
    double squares = 0.0;
    for (const double x : e) squares += x * x;
    return sums.weights[row] * squares;
  });
  return head;
}

}  // namespace keyhole::tools
