// Random classifiers, and their results by the definition in double precision.
#pragma once

#include "index/partitions/query_classifier.h"
#include "tests/index/keys.h"
#include "tests/normal.h"

namespace keyhole::index::test {

inline uint16_t half(float x) {
  uint16_t out = 0;
  context().kernels->from_f32[static_cast<size_t>(DType::f16)](
      &x, reinterpret_cast<std::byte*>(&out), 1);
  return out;
}
inline std::vector<uint16_t> halves(size_t n, float scale, std::mt19937& random) {
  keyhole::test::Normal<float> normal(0.0F, scale);
  std::vector<uint16_t> out(n);
  for (uint16_t& x : out) x = half(normal(random));
  return out;
}
inline double value(uint16_t h) {
  float x = 0;
  context().kernels->to_f32[static_cast<size_t>(DType::f16)](reinterpret_cast<const std::byte*>(&h),
                                                             &x, 1);
  return x;
}

inline ClassifierWeights random_weights(uint32_t dim, uint32_t hidden, size_t count,
                                        std::mt19937& random) {
  ClassifierWeights w;
  w.dim = dim;
  w.hidden = hidden;
  w.partitions.centroids = gaussian(count, dim, random);
  w.partitions.bonuses = gaussian(count, 1, random);
  w.w1 = halves(size_t{hidden} * dim, 0.1F, random);
  w.b1 = gaussian(hidden, 1, random);
  w.w2 = halves(count * hidden, 0.1F, random);
  w.b2 = gaussian(count, 1, random);
  w.w3 = halves(count * dim, 0.1F, random);
  return w;
}

/// The densities by definition: sum over heads of softmax_c(logit + log_sizes) / n(c), for the partitions with keys.
inline std::vector<double> densities(const ClassifierWeights& w, const std::vector<float>& queries,
                                     const std::vector<float>& log_sizes) {
  const size_t count = w.partitions.count();
  std::vector<double> out(count, 0.0);
  for (size_t h = 0; h < queries.size() / w.dim; ++h) {
    const float* x = queries.data() + h * w.dim;
    std::vector<double> hidden(w.hidden);
    for (size_t u = 0; u < w.hidden; ++u) {
      double sum = w.b1[u];
      for (size_t j = 0; j < w.dim; ++j) sum += value(w.w1[u * w.dim + j]) * x[j];
      hidden[u] = std::max(sum, 0.0);
    }
    std::vector<double> p(count);
    double total = 0.0;
    for (size_t c = 0; c < count; ++c) {
      double z = w.b2[c];
      for (size_t u = 0; u < w.hidden; ++u) z += value(w.w2[c * w.hidden + u]) * hidden[u];
      for (size_t j = 0; j < w.dim; ++j) z += value(w.w3[c * w.dim + j]) * x[j];
      p[c] = std::exp(z);
      total += p[c] * std::exp(double{log_sizes[c]});
    }
    for (size_t c = 0; c < count; ++c) out[c] += p[c] / total;
  }
  return out;
}

}  // namespace keyhole::index::test
