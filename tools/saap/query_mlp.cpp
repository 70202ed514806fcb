#include "tools/saap/query_mlp.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "tools/llama/blas.h"
#include "tools/llama/vector_math.h"

namespace keyhole::tools {
namespace {

constexpr float kEpsilon = 1e-5F;   // of batch norm
constexpr float kMomentum = 0.05F;  // of the running mean and variance

std::vector<float> uniform(size_t n, float limit, std::mt19937_64& random) {
  std::uniform_real_distribution<float> value(-limit, limit);
  std::vector<float> out(n);
  for (float& x : out) x = value(random);
  return out;
}

// log softmax of a row, in place.
void log_softmax(float* row, size_t n, std::vector<float>& scratch) {
  const float top = *std::max_element(row, row + n);
  scratch.resize(n);
  for (size_t i = 0; i < n; ++i) scratch[i] = row[i] - top;
  exp_in_place(scratch.data(), n);
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += scratch[i];
  const float shift = top + static_cast<float>(std::log(sum));
  for (size_t i = 0; i < n; ++i) row[i] -= shift;
}

// Each row of logits `[n, c]` before the matrix product: offset plus prior.
void start_logits(const std::vector<float>& offset, const float* priors, size_t n, float* logits) {
  const size_t c = offset.size();
  for (size_t i = 0; i < n * c; i += c) {
    for (size_t j = 0; j < c; ++j) logits[i + j] = offset[j] + priors[i + j];
  }
}

using Arrays = std::array<std::vector<float>*, 6>;
Arrays arrays(QueryMlp::Parameters& p) { return {&p.w1, &p.gamma, &p.beta, &p.w2, &p.b2, &p.w3}; }

}  // namespace

void FoldedMlp::log_probabilities(const float* inputs, const float* priors, size_t n,
                                  std::vector<float>& out) const {
  const auto [d, h, c] = shape;
  std::vector<float> hidden(n * h);
  for (size_t i = 0; i < n; ++i) std::copy_n(b1.data(), h, hidden.data() + i * h);
  gemm_nt(n, h, d, inputs, d, w1.data(), d, 1, hidden.data(), h);
  for (float& x : hidden) x = std::max(x, 0.0F);
  out.resize(n * c);
  start_logits(b2, priors, n, out.data());
  gemm_nt(n, c, h, hidden.data(), h, w2.data(), h, 1, out.data(), c);
  gemm_nt(n, c, d, inputs, d, w3.data(), d, 1, out.data(), c);
  std::vector<float> scratch;
  for (size_t i = 0; i < n; ++i) log_softmax(out.data() + i * c, c, scratch);
}

QueryMlp::QueryMlp(const MlpShape& shape, const std::vector<float>& linear, const float* sample,
                   size_t n, uint64_t seed)
    : shape_(shape),
      input_mean_(shape.dim),
      input_scale_(shape.dim),
      running_mean_(shape.hidden, 0.0F),
      running_variance_(shape.hidden, 1.0F) {
  for (size_t j = 0; j < shape.dim; ++j) {
    double sum = 0;
    double squares = 0;
    for (size_t i = 0; i < n; ++i) {
      const double x = sample[i * shape.dim + j];
      sum += x;
      squares += x * x;
    }
    const double mean = sum / static_cast<double>(n);
    const double variance = std::max(squares / static_cast<double>(n) - mean * mean, 0.0);
    input_mean_[j] = static_cast<float>(mean);
    input_scale_[j] = variance > 1e-12 ? static_cast<float>(1 / std::sqrt(variance)) : 1.0F;
  }
  std::mt19937_64 random(seed);
  // Kaiming's uniform start, as PyTorch's linear layers have it.
  parameters_.w1 =
      uniform(shape.hidden * shape.dim, 1 / std::sqrt(static_cast<float>(shape.dim)), random);
  parameters_.gamma.assign(shape.hidden, 1.0F);
  parameters_.beta.assign(shape.hidden, 0.0F);
  // The hidden layer begins as a whisper beside the linear part, which is a good answer already.
  parameters_.w2 = uniform(shape.outputs * shape.hidden,
                           0.1F / std::sqrt(static_cast<float>(shape.hidden)), random);
  parameters_.b2.assign(shape.outputs, 0.0F);
  parameters_.w3 = linear;
  for (size_t c = 0; c < shape.outputs; ++c) {
    float* row = parameters_.w3.data() + c * shape.dim;
    for (size_t j = 0; j < shape.dim; ++j) {
      parameters_.b2[c] += row[j] * input_mean_[j];
      row[j] /= input_scale_[j];
    }
  }
  gradient_ = parameters_;
  const Arrays all = arrays(parameters_);
  for (size_t a = 0; a < all.size(); ++a) {
    moments_[a].first.assign(all[a]->size(), 0.0F);
    moments_[a].second.assign(all[a]->size(), 0.0F);
  }
}

void QueryMlp::standardise(const MlpBatch& batch) {
  const size_t d = shape_.dim;
  x_.resize(batch.size * d);
  for (size_t i = 0; i < batch.size; ++i) {
    for (size_t j = 0; j < d; ++j) {
      x_[i * d + j] = (batch.inputs[i * d + j] - input_mean_[j]) * input_scale_[j];
    }
  }
}

void QueryMlp::forward_hidden(size_t n) {
  const auto [d, h, c] = shape_;
  normal_.resize(n * h);
  hidden_.resize(n * h);
  gemm_nt(n, h, d, x_.data(), d, parameters_.w1.data(), d, 0, normal_.data(), h);
  std::vector<float> mean(h, 0.0F);
  std::vector<float> variance(h, 0.0F);
  const float share = 1.0F / static_cast<float>(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < h; ++j) mean[j] += normal_[i * h + j];
  }
  for (float& m : mean) m *= share;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < h; ++j) {
      const float x = normal_[i * h + j] - mean[j];
      normal_[i * h + j] = x;
      variance[j] += x * x;
    }
  }
  deviation_.resize(h);
  const float unbiased = static_cast<float>(n) / static_cast<float>(n - 1);
  for (size_t j = 0; j < h; ++j) {
    variance[j] *= share;
    deviation_[j] = 1 / std::sqrt(variance[j] + kEpsilon);
    running_mean_[j] += kMomentum * (mean[j] - running_mean_[j]);
    running_variance_[j] += kMomentum * (unbiased * variance[j] - running_variance_[j]);
  }
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < h; ++j) {
      normal_[i * h + j] *= deviation_[j];
      hidden_[i * h + j] =
          std::max(parameters_.gamma[j] * normal_[i * h + j] + parameters_.beta[j], 0.0F);
    }
  }
}

// The loss; logits_ become its slope with respect to themselves, w_i (p - t) / sum w.
double QueryMlp::loss_and_slope(const MlpBatch& batch) {
  const size_t c = shape_.outputs;
  double total = 0;
  for (size_t i = 0; i < batch.size; ++i) total += batch.weights[i];
  double loss = 0;
  std::vector<float> scratch;
  for (size_t i = 0; i < batch.size; ++i) {
    float* row = logits_.data() + i * c;
    const float* target = batch.targets + i * c;
    log_softmax(row, c, scratch);
    double divergence = 0;
    for (size_t j = 0; j < c; ++j) {
      if (target[j] > 0) divergence += target[j] * (std::log(target[j]) - row[j]);
    }
    loss += batch.weights[i] * divergence;
    exp_in_place(row, c);
    const auto weight = static_cast<float>(batch.weights[i] / total);
    for (size_t j = 0; j < c; ++j) row[j] = weight * (row[j] - target[j]);
  }
  return loss / total;
}

// From slope_ at the hidden layer's output to the gradients of gamma, beta and w1.
void QueryMlp::backward_hidden(size_t n) {
  const auto [d, h, c] = shape_;
  std::fill(gradient_.gamma.begin(), gradient_.gamma.end(), 0.0F);
  std::fill(gradient_.beta.begin(), gradient_.beta.end(), 0.0F);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < h; ++j) {
      float& s = slope_[i * h + j];
      s = hidden_[i * h + j] > 0 ? s : 0.0F;
      gradient_.beta[j] += s;
      gradient_.gamma[j] += s * normal_[i * h + j];
    }
  }
  // Through the batch's mean and variance: dA = gamma / sigma * (dY - mean dY - N mean(dY N)).
  const float share = 1.0F / static_cast<float>(n);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < h; ++j) {
      float& s = slope_[i * h + j];
      s = parameters_.gamma[j] * deviation_[j] *
          (s - share * gradient_.beta[j] - normal_[i * h + j] * share * gradient_.gamma[j]);
    }
  }
  gemm_tn(h, d, n, slope_.data(), h, x_.data(), d, 0, gradient_.w1.data(), d);
}

double QueryMlp::learn(const MlpBatch& batch) {
  const auto [d, h, c] = shape_;
  const size_t n = batch.size;
  standardise(batch);
  forward_hidden(n);
  logits_.resize(n * c);
  start_logits(parameters_.b2, batch.priors, n, logits_.data());
  gemm_nt(n, c, h, hidden_.data(), h, parameters_.w2.data(), h, 1, logits_.data(), c);
  gemm_nt(n, c, d, x_.data(), d, parameters_.w3.data(), d, 1, logits_.data(), c);
  const double loss = loss_and_slope(batch);

  std::fill(gradient_.b2.begin(), gradient_.b2.end(), 0.0F);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < c; ++j) gradient_.b2[j] += logits_[i * c + j];
  }
  gemm_tn(c, h, n, logits_.data(), c, hidden_.data(), h, 0, gradient_.w2.data(), h);
  gemm_tn(c, d, n, logits_.data(), c, x_.data(), d, 0, gradient_.w3.data(), d);
  slope_.resize(n * h);
  gemm_nn(n, h, c, logits_.data(), c, parameters_.w2.data(), h, 0, slope_.data(), h);
  backward_hidden(n);
  return loss;
}

void QueryMlp::adam_step(float rate, float decay) {
  constexpr float kFirst = 0.9F;
  constexpr float kSecond = 0.999F;
  ++steps_;
  const auto t = static_cast<double>(steps_);
  const auto first_share = static_cast<float>(1 / (1 - std::pow(double{kFirst}, t)));
  const auto second_share = static_cast<float>(1 / (1 - std::pow(double{kSecond}, t)));
  const Arrays values = arrays(parameters_);
  const Arrays slopes = arrays(gradient_);
  for (size_t a = 0; a < values.size(); ++a) {
    // Only the hidden layer's matrices decay: a norm's scale and the offsets are few and mean something.
    const float keep = a == 0 || a == 3 ? 1 - rate * decay : 1.0F;
    float* x = values[a]->data();
    const float* g = slopes[a]->data();
    float* m = moments_[a].first.data();
    float* v = moments_[a].second.data();
    for (size_t i = 0; i < values[a]->size(); ++i) {
      m[i] = kFirst * m[i] + (1 - kFirst) * g[i];
      v[i] = kSecond * v[i] + (1 - kSecond) * g[i] * g[i];
      x[i] = keep * x[i] - rate * m[i] * first_share / (std::sqrt(v[i] * second_share) + 1e-8F);
    }
  }
}

FoldedMlp QueryMlp::fold() const {
  const auto [d, h, c] = shape_;
  FoldedMlp out{shape_,
                std::vector<float>(h * d),
                std::vector<float>(h),
                parameters_.w2,
                parameters_.b2,
                parameters_.w3};
  for (size_t j = 0; j < c; ++j) {
    double shift = 0;
    for (size_t i = 0; i < d; ++i) {
      out.w3[j * d + i] *= input_scale_[i];
      shift += double{out.w3[j * d + i]} * input_mean_[i];
    }
    out.b2[j] -= static_cast<float>(shift);
  }
  for (size_t j = 0; j < h; ++j) {
    const double factor = parameters_.gamma[j] / std::sqrt(double{running_variance_[j]} + kEpsilon);
    double shift = parameters_.beta[j] - factor * running_mean_[j];
    for (size_t i = 0; i < d; ++i) {
      const double weight = factor * parameters_.w1[j * d + i] * input_scale_[i];
      out.w1[j * d + i] = static_cast<float>(weight);
      shift -= weight * input_mean_[i];
    }
    out.b1[j] = static_cast<float>(shift);
  }
  return out;
}

}  // namespace keyhole::tools
