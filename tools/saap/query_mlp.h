// The query classifier in training: x `[d]` -> W1 -> batch norm -> ReLU -> W2 + b2 -> softmax over the
// partitions (Saap section 4 and 6.1). Trained with Adam on KL(target || softmax).
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
  /// One array of every trained number, in this order; gradients have the same form.
  struct Parameters {
    std::vector<float> w1, gamma, beta, w2, b2, w3;
  };

  /// Random start, but for w3, which starts as `linear` `[outputs, dim]`. Inputs are standardised with the
  /// mean and deviation of `sample` `[n, dim]` first.
  QueryMlp(const MlpShape& shape, const std::vector<float>& linear, const float* sample, size_t n,
           uint64_t seed);

  /// The loss in training mode (the batch's own mean and variance), its gradient in gradient(), and the
  /// running mean and variance updated. size >= 2.
  double learn(const MlpBatch& batch);
  [[nodiscard]] const Parameters& gradient() const { return gradient_; }
  [[nodiscard]] Parameters& parameters() { return parameters_; }
  [[nodiscard]] const MlpShape& shape() const { return shape_; }

  /// One step of Adam (beta 0.9 and 0.999) along the gradient, with weights decoupled-decayed.
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
  // Working memory of one batch of n.
  Matrix x_;             // `[n, dim]`, standardised
  Matrix normal_;        // `[n, hidden]` after batch norm, before gamma and beta
  Matrix hidden_;        // `[n, hidden]` after ReLU
  Matrix logits_;        // `[n, outputs]`; become the loss's slope
  Matrix slope_;         // `[n, hidden]`
  RowVector deviation_;  // `[hidden]` 1 / sqrt(variance + epsilon)
};

}  // namespace keyhole::tools
