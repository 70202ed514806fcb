// How far one answer of a model is from another, for the checks that compare answers with Keyhole and without it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace keyhole::llama_cpp {

struct Divergence {
  double nats = std::numeric_limits<double>::infinity();  // KL(truth || answer), of their softmax
  bool same_best = false;                                 // whether both have the same best token
};

/// `truth`, `answer`: n logits each, n > 0. Infinity where one of them is null, as llama.cpp's answer to a token that
/// has none is, and where the divergence is not finite: std::max() would drop a NaN.
[[nodiscard]] inline Divergence divergence(const float* truth, const float* answer, int n) {
  Divergence result;
  if (truth == nullptr || answer == nullptr) return result;
  const auto log_sum = [n](const float* x) {
    const double most = *std::max_element(x, x + n);
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += std::exp(x[i] - most);
    return most + std::log(sum);
  };
  const double z_truth = log_sum(truth);
  const double z_answer = log_sum(answer);
  double nats = 0;
  for (int i = 0; i < n; ++i) {
    const double log_truth = truth[i] - z_truth;
    nats += std::exp(log_truth) * (log_truth - (answer[i] - z_answer));
  }
  if (!std::isfinite(nats)) return result;
  const std::ptrdiff_t best = std::max_element(truth, truth + n) - truth;
  return {nats, std::max_element(answer, answer + n) - answer == best};
}

}  // namespace keyhole::llama_cpp
