// Tests with recorded heads of real models: exact attention in double, and the session that is held against it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "tests/relative_error.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {

/// Exact attention of one query head: its output, and how sharp it is.
struct HeadTruth {
  std::vector<double> o;
  double lse = 0.0;
  double first = 0.0;     ///< the weight of token 0
  double heaviest = 0.0;  ///< the weight of the 16 heaviest tokens

  /// q `[dim]`, to the first `tokens` of keys and values `[token, dim]`.
  HeadTruth(const float* q, const std::vector<float>& keys, const std::vector<float>& values,
            uint32_t tokens, uint32_t dim)
      : o(dim, 0.0) {
    std::vector<double> weights(tokens);
    for (uint32_t t = 0; t < tokens; ++t) {
      weights[t] = exact_dot(q, &keys[size_t{t} * dim], dim) / std::sqrt(static_cast<double>(dim));
    }
    const double top = *std::max_element(weights.begin(), weights.end());
    double sum = 0.0;
    for (double& w : weights) sum += w = std::exp(w - top);
    lse = top + std::log(sum);
    for (uint32_t t = 0; t < tokens; ++t) {
      weights[t] /= sum;
      add_weighted(o.data(), weights[t], &values[size_t{t} * dim], dim);
    }
    first = weights.front();
    std::partial_sort(weights.begin(), weights.begin() + 16, weights.end(), std::greater<>());
    heaviest = std::accumulate(weights.begin(), weights.begin() + 16, 0.0);
  }
  [[nodiscard]] bool is_sharp() const { return heaviest >= 0.9; }
  [[nodiscard]] double error(const float* seen) const { return relative_error(seen, o); }
};

/// The value below which `share` of them are; `ascending` has at least one.
[[nodiscard]] inline double quantile(const std::vector<double>& ascending, double share) {
  return ascending[static_cast<size_t>(share * static_cast<double>(ascending.size() - 1))];
}

/// An engine of one layer, K and V in f16.
[[nodiscard]] inline keyhole_engine_config heads_engine(uint32_t q_heads, uint32_t kv_heads,
                                                        uint32_t dim) {
  keyhole_engine_config c = small_engine();
  c.layers = 1;
  c.kv_heads = kv_heads;
  c.q_heads = q_heads;
  c.head_dim = dim;
  c.kv_dtype = KEYHOLE_F16;
  return c;
}

/// A session with a window of 64 tokens.
[[nodiscard]] inline keyhole_session_config heads_session(const char* index, uint32_t sink,
                                                          keyhole_tail_mode tail, uint32_t top_k) {
  keyhole_session_config c = small_session();
  c.sink = sink;
  c.window = 64;
  c.index = index;
  c.budget.top_k = top_k;
  c.budget.tail = tail;
  return c;
}

}  // namespace keyhole::test
