#include "tools/saap/folded_mlp.h"

#include "tools/saap/matrices.h"

namespace keyhole::tools {

void FoldedMlp::log_probabilities(const float* inputs, const float* priors, size_t n,
                                  std::vector<float>& out) const {
  const auto x = as_matrix(inputs, n, shape.dim);
  Matrix hidden = x * as_matrix(w1, shape.dim).transpose();
  hidden = (hidden.rowwise() + as_row(b1)).cwiseMax(0.0F);
  out.resize(n * shape.outputs);
  auto logits = as_matrix(out, shape.outputs);
  logits = as_matrix(priors, n, shape.outputs).rowwise() + as_row(b2);
  logits.noalias() += hidden * as_matrix(w2, shape.hidden).transpose();
  logits.noalias() += x * as_matrix(w3, shape.dim).transpose();
  log_softmax(logits);
}

}  // namespace keyhole::tools
