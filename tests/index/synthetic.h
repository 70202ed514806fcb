// Synthetic keys and queries, for tests and benchmarks.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/normal.h"

namespace keyhole::index::test {

/// Standard normal values.
inline std::vector<float> gaussian(size_t n, uint32_t dim, std::mt19937& random) {
  keyhole::test::Normal<float> normal;
  std::vector<float> values(n * dim);
  for (float& v : values) v = normal(random);
  return values;
}

/// Small integers, of which inner products are exact in fp32 and many are equal.
inline std::vector<float> integers(size_t n, uint32_t dim, std::mt19937& random) {
  std::uniform_int_distribution<int> value(-2, 2);
  std::vector<float> values(n * dim);
  for (float& v : values) v = static_cast<float>(value(random));
  return values;
}

/// Stand-ins for the keys of an attention head: a strong common mean, a power-law spectrum, topics that
/// last for 64 tokens, log-normal lengths. The lengths spread as they do where a graph over raw inner
/// products collapses.
inline std::vector<float> attention_keys(size_t n, uint32_t dim, std::mt19937& random) {
  keyhole::test::Normal<float> normal;
  std::vector<float> mean(dim);
  std::vector<float> width(dim);
  for (uint32_t j = 0; j < dim; ++j) {
    mean[j] = 1.8F * normal(random);
    width[j] = 4.0F / std::sqrt(1.0F + static_cast<float>(j));
  }
  std::vector<float> topic(dim);
  std::vector<float> values(n * dim);
  for (size_t i = 0; i < n; ++i) {
    if (i % 64 == 0) {
      for (uint32_t j = 0; j < dim; ++j) topic[j] = width[j] * normal(random);
    }
    const float length = std::exp(0.25F * normal(random));
    for (uint32_t j = 0; j < dim; ++j) {
      values[i * dim + j] = length * (mean[j] + topic[j] + width[j] * normal(random));
    }
  }
  return values;
}

/// Queries from another distribution than the keys, each drawn a little towards one of `count` rows, which row(i,
/// out) writes.
template <class Row>
std::vector<float> attention_queries(size_t n, uint32_t dim, size_t count, const Row& row,
                                     std::mt19937& random) {
  std::vector<float> values = gaussian(n, dim, random);
  std::vector<float> key(dim);
  for (size_t i = 0; i < n; ++i) {
    row(random() % count, key.data());
    for (uint32_t j = 0; j < dim; ++j) values[i * dim + j] += 0.35F * key[j];
  }
  return values;
}

}  // namespace keyhole::index::test
