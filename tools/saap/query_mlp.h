// The query classifier in training: x `[d]` -> W1 -> batch norm -> ReLU -> W2 + b2 -> softmax over the partitions
// (Saap section 4 and 6.1), by Adam on KL(target || softmax).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/saap/folded_mlp.h"
#include "tools/saap/matrices.h"

namespace keyhole::tools {

/// A mini-batch; loss = sum_i weight_i KL(target_i || softmax_i) / sum_i weight_i.
struct MlpBatch {
  size_t size = 0;
  const float* inputs = nullptr;   ///< `[size, dim]`
  const float* priors = nullptr;   ///< `[size, outputs]`, added to the logits
  const float* targets = nullptr;  ///< `[size, outputs]`, rows sum to 1
  const float* weights = nullptr;  ///< `[size]`, >= 0, not all 0
};

class QueryMlp {
 public:
  /// All trained numbers, one array for each; gradients have the same form.
  struct Parameters {
    std::vector<float> w1, gamma, beta, w2, b2, w3;
  };

  /// Starts from random numbers, except w3, which starts as `linear` `[outputs, dim]`. Inputs are first standardised
  /// with the mean and deviation of `sample` `[n, dim]`.
  QueryMlp(const MlpShape& shape, const std::vector<float>& linear, const float* sample, size_t n,
           uint64_t seed);

  /// Computes the loss in training mode (with the batch's own mean and variance) and returns it, writes its gradient
  /// to gradient(), and updates the running mean and variance. size >= 2.
  double learn(const MlpBatch& batch);
  [[nodiscard]] const Parameters& gradient() const { return gradient_; }
  [[nodiscard]] Parameters& parameters() { return parameters_; }
  [[nodiscard]] const MlpShape& shape() const { return shape_; }

  /// Takes one step of Adam (beta 0.9 and 0.999) along the gradient, with decoupled decay of the weights.
  void adam_step(float rate, float decay);

  [[nodiscard]] FoldedMlp fold() const;

 private:
  struct Moments {
    Eigen::ArrayXf first, second;
  };
  void forward_hidden();
  double loss_and_slope(const MlpBatch& batch);
  void backward_hidden();

  MlpShape shape_;
  RowVector input_mean_, input_scale_;  // `[dim]`
  Parameters parameters_, gradient_;
  Moments moments_[6];
  uint64_t steps_ = 0;
  RowVector running_mean_, running_variance_;  // `[hidden]`
  // The working memory of one batch of n.
  Matrix x_;             // `[n, dim]`, standardised
  Matrix normal_;        // `[n, hidden]` after batch norm, before gamma and beta
  Matrix hidden_;        // `[n, hidden]` after ReLU
  Matrix logits_;        // `[n, outputs]`; become the loss's slope
  Matrix slope_;         // `[n, hidden]`
  RowVector deviation_;  // `[hidden]` 1 / sqrt(variance + epsilon)
};

}  // namespace keyhole::tools
