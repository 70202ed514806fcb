#include "tools/saap/query_mlp.h"

#include <array>
#include <cmath>
#include <limits>
#include <random>

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

using Arrays = std::array<std::vector<float>*, 6>;
Arrays arrays(QueryMlp::Parameters& p) { return {&p.w1, &p.gamma, &p.beta, &p.w2, &p.b2, &p.w3}; }

}  // namespace

QueryMlp::QueryMlp(const MlpShape& shape, const std::vector<float>& linear, const float* sample,
                   size_t n, uint64_t seed)
    : shape_(shape),
      running_mean_(RowVector::Zero(static_cast<Eigen::Index>(shape.hidden))),
      running_variance_(RowVector::Ones(static_cast<Eigen::Index>(shape.hidden))) {
  const auto rows = as_matrix(sample, n, shape.dim).cast<double>();
  const Eigen::RowVectorXd mean = rows.colwise().mean();
  const Eigen::ArrayXd variance =
      (rows.colwise().squaredNorm() / static_cast<double>(n) - mean.cwiseAbs2()).array();
  input_mean_ = mean.cast<float>();
  // A component that never changes keeps its scale.
  input_scale_ = (variance > 1e-12).select(variance.rsqrt(), 1.0).cast<float>();

  std::mt19937_64 random(seed);
  // Kaiming's uniform start, as PyTorch's linear layers have it.
  parameters_.w1 =
      uniform(shape.hidden * shape.dim, 1 / std::sqrt(static_cast<float>(shape.dim)), random);
  parameters_.gamma.assign(shape.hidden, 1.0F);
  parameters_.beta.assign(shape.hidden, 0.0F);
  // The hidden layer starts small beside the linear part, which is a good answer already.
  parameters_.w2 = uniform(shape.outputs * shape.hidden,
                           0.1F / std::sqrt(static_cast<float>(shape.hidden)), random);
  parameters_.w3 = linear;
  parameters_.b2.resize(shape.outputs);
  auto w3 = as_matrix(parameters_.w3, shape.dim);
  as_row(parameters_.b2) = input_mean_ * w3.transpose();
  w3.array().rowwise() /= input_scale_.array();
  gradient_ = parameters_;
  const Arrays all = arrays(parameters_);
  for (size_t a = 0; a < all.size(); ++a) {
    moments_[a].first = moments_[a].second =
        Eigen::ArrayXf::Zero(static_cast<Eigen::Index>(all[a]->size()));
  }
}

void QueryMlp::forward_hidden() {
  const auto n = static_cast<float>(x_.rows());
  normal_.noalias() = x_ * as_matrix(parameters_.w1, shape_.dim).transpose();
  const RowVector mean = column_sums(normal_) / n;
  normal_.rowwise() -= mean;
  const RowVector variance = column_sums(normal_.cwiseAbs2()) / n;
  deviation_ = (variance.array() + kEpsilon).rsqrt();
  running_mean_ += kMomentum * (mean - running_mean_);
  running_variance_ += kMomentum * (n / (n - 1) * variance - running_variance_);
  normal_.array().rowwise() *= deviation_.array();
  hidden_ = normal_.array().rowwise() * as_row(parameters_.gamma).array();
  hidden_ = (hidden_.rowwise() + as_row(parameters_.beta)).cwiseMax(0.0F);
}

// The loss; logits_ become its slope with respect to themselves, w_i (p - t) / sum w.
double QueryMlp::loss_and_slope(const MlpBatch& batch) {
  const auto target = as_matrix(batch.targets, batch.size, shape_.outputs).array();
  const auto weights = as_matrix(batch.weights, batch.size, 1).col(0).array();
  const double total = weights.cast<double>().sum();
  log_softmax(logits_);
  const auto logits = logits_.array();
  // t (ln t - ln p), which is 0 where t is: the smallest positive number keeps its logarithm finite.
  const Eigen::ArrayXf divergence =
      (target * (target.max(std::numeric_limits<float>::min()).log() - logits)).rowwise().sum();
  const double loss = (weights * divergence).cast<double>().sum() / total;
  logits_ = (weights / static_cast<float>(total)).matrix().asDiagonal() *
            (logits.exp() - target).matrix();
  return loss;
}

// Computes the gradients of gamma, beta and w1 from slope_ at the hidden layer's output.
void QueryMlp::backward_hidden() {
  auto gamma = as_row(gradient_.gamma);
  auto beta = as_row(gradient_.beta);
  slope_.array() *= (hidden_.array() > 0).cast<float>();
  beta = column_sums(slope_);
  gamma = column_sums(slope_.cwiseProduct(normal_));
  // Through the batch's mean and variance: dA = gamma / sigma * (dY - mean dY - N mean(dY N)).
  const float share = 1.0F / static_cast<float>(slope_.rows());
  const RowVector scale = as_row(parameters_.gamma).cwiseProduct(deviation_);
  const RowVector mean = share * beta;
  const RowVector along = share * gamma;
  for (Eigen::Index i = 0; i < slope_.rows(); ++i) {
    slope_.row(i) = (slope_.row(i) - mean - normal_.row(i).cwiseProduct(along)).cwiseProduct(scale);
  }
  as_matrix(gradient_.w1, shape_.dim).noalias() = slope_.transpose() * x_;
}

double QueryMlp::learn(const MlpBatch& batch) {
  const auto w2 = as_matrix(parameters_.w2, shape_.hidden);
  const auto w3 = as_matrix(parameters_.w3, shape_.dim);
  x_ = as_matrix(batch.inputs, batch.size, shape_.dim).rowwise() - input_mean_;
  x_.array().rowwise() *= input_scale_.array();
  forward_hidden();
  logits_ = as_matrix(batch.priors, batch.size, shape_.outputs).rowwise() + as_row(parameters_.b2);
  logits_.noalias() += hidden_ * w2.transpose();
  logits_.noalias() += x_ * w3.transpose();
  const double loss = loss_and_slope(batch);

  as_row(gradient_.b2) = column_sums(logits_);
  as_matrix(gradient_.w2, shape_.hidden).noalias() = logits_.transpose() * hidden_;
  as_matrix(gradient_.w3, shape_.dim).noalias() = logits_.transpose() * x_;
  slope_.noalias() = logits_ * w2;
  backward_hidden();
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
    auto x = as_row(*values[a]).transpose().array();
    const auto g = as_row(*slopes[a]).transpose().array();
    auto& [m, v] = moments_[a];
    m = kFirst * m + (1 - kFirst) * g;
    v = kSecond * v + (1 - kSecond) * g.square();
    x = keep * x - rate * first_share * m / ((v * second_share).sqrt() + 1e-8F);
  }
}

FoldedMlp QueryMlp::fold() const {
  const auto w1 = as_matrix(parameters_.w1, shape_.dim).cast<double>();
  const Eigen::RowVectorXd mean = input_mean_.cast<double>();
  const Eigen::RowVectorXd scale = input_scale_.cast<double>();
  const Eigen::RowVectorXd factor = as_row(parameters_.gamma).cast<double>().array() /
                                    (running_variance_.cast<double>().array() + kEpsilon).sqrt();
  FoldedMlp out{shape_,         parameters_.w1, parameters_.beta,
                parameters_.w2, parameters_.b2, parameters_.w3};
  auto w3 = as_matrix(out.w3, shape_.dim);
  w3.array().rowwise() *= input_scale_.array();
  as_row(out.b2) -= (mean * w3.cast<double>().transpose()).cast<float>();
  const Eigen::MatrixXd folded = factor.asDiagonal() * w1 * scale.asDiagonal();
  as_matrix(out.w1, shape_.dim) = folded.cast<float>();
  as_row(out.b1) = (as_row(parameters_.beta).cast<double>() -
                    factor.cwiseProduct(running_mean_.cast<double>()) - mean * folded.transpose())
                       .cast<float>();
  return out;
}

}  // namespace keyhole::tools
