// The query classifier in the form in which it is used after training.
#pragma once

#include <cstddef>
#include <vector>

namespace keyhole::tools {

struct MlpShape {
  size_t dim = 0, hidden = 0, outputs = 0;
};

/// The network with batch norm and the inputs' scaling folded into the first layer: p = softmax(w2 relu(w1 x + b1) +
/// w3 x + b2 + prior).
struct FoldedMlp {
  MlpShape shape;
  std::vector<float> w1;  ///< `[hidden, dim]`
  std::vector<float> b1;  ///< `[hidden]`
  std::vector<float> w2;  ///< `[outputs, hidden]`
  std::vector<float> b2;  ///< `[outputs]`
  std::vector<float> w3;  ///< `[outputs, dim]`

  /// Returns logarithms of the probabilities, `[n, outputs]`, for inputs `[n, dim]` with priors `[n, outputs]`.
  void log_probabilities(const float* inputs, const float* priors, size_t n,
                         std::vector<float>& out) const;
};

}  // namespace keyhole::tools
