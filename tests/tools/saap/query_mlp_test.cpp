#include "tools/saap/query_mlp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/tools/saap/gaussian.h"

namespace keyhole::tools {
namespace {

struct Data {
  Data(const MlpShape& s, size_t n, std::mt19937& random)
      : shape(s),
        size(n),
        inputs(gaussian(n * s.dim, 2.0F, random)),
        priors(gaussian(n * s.outputs, 1.0F, random)),
        targets(n * s.outputs),
        weights(n) {
    for (size_t i = 0; i < n; ++i) {
      double sum = 0;
      for (size_t c = 0; c < s.outputs; ++c) {
        float& t = targets[i * s.outputs + c];
        t = random() % 3 == 0 ? 0.0F : static_cast<float>(random() % 100);
        sum += t;
      }
      targets[i * s.outputs] += 1;
      for (size_t c = 0; c < s.outputs; ++c)
        targets[i * s.outputs + c] /= static_cast<float>(sum + 1);
      weights[i] = 0.1F + 0.01F * static_cast<float>(random() % 100);
    }
    // Inputs with a mean and deviations of their own, which standardising must take out.
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = inputs[i] * static_cast<float>(1 + i % s.dim) + 3.0F;
    }
  }
  [[nodiscard]] MlpBatch batch() const {
    return {size, inputs.data(), priors.data(), targets.data(), weights.data()};
  }
  MlpShape shape;
  size_t size;
  std::vector<float> inputs, priors, targets, weights;
};

// The loss by its definition, in double: inputs standardised over `sample`, batch norm over the batch.
double loss_of(const Data& data, const QueryMlp::Parameters& p, const std::vector<float>& sample) {
  const auto [d, h, c] = data.shape;
  const size_t n = data.size;
  const auto standard = [&, d = d](size_t i, size_t j) {
    double sum = 0;
    double squares = 0;
    const size_t rows = sample.size() / d;
    for (size_t r = 0; r < rows; ++r) {
      sum += sample[r * d + j];
      squares += double{sample[r * d + j]} * sample[r * d + j];
    }
    const double mean = sum / static_cast<double>(rows);
    return (data.inputs[i * d + j] - mean) /
           std::sqrt(squares / static_cast<double>(rows) - mean * mean);
  };
  std::vector<double> x(n * d);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < d; ++j) x[i * d + j] = standard(i, j);
  }
  std::vector<double> hidden(n * h);
  for (size_t u = 0; u < h; ++u) {
    std::vector<double> a(n);
    double mean = 0;
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < d; ++j) a[i] += x[i * d + j] * p.w1[u * d + j];
      mean += a[i] / static_cast<double>(n);
    }
    double variance = 0;
    for (size_t i = 0; i < n; ++i)
      variance += (a[i] - mean) * (a[i] - mean) / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) {
      hidden[i * h + u] =
          std::max(p.gamma[u] * (a[i] - mean) / std::sqrt(variance + 1e-5) + p.beta[u], 0.0);
    }
  }
  double loss = 0;
  double total = 0;
  for (size_t i = 0; i < n; ++i) {
    std::vector<double> z(c);
    double sum = 0;
    for (size_t o = 0; o < c; ++o) {
      z[o] = double{p.b2[o]} + data.priors[i * c + o];
      for (size_t u = 0; u < h; ++u) z[o] += p.w2[o * h + u] * hidden[i * h + u];
      for (size_t j = 0; j < d; ++j) z[o] += p.w3[o * d + j] * x[i * d + j];
      sum += std::exp(z[o]);
    }
    for (size_t o = 0; o < c; ++o) {
      const double t = data.targets[i * c + o];
      if (t > 0) loss += data.weights[i] * t * (std::log(t) - z[o] + std::log(sum));
    }
    total += data.weights[i];
  }
  return loss / total;
}

TEST(QueryMlp, GradientsAreThoseOfFiniteDifferences) {
  std::mt19937 random(3);
  const MlpShape shape = {8, 12, 7};
  const Data data(shape, 20, random);
  QueryMlp mlp(shape, gaussian(7 * 8, 0.1F, random), data.inputs.data(), data.size, 5);
  // Away from the start, where offsets are zero and scales one.
  auto& p = mlp.parameters();
  for (float& x : p.gamma) x += 0.3F * gaussian(1, 1, random)[0];
  for (float& x : p.beta) x += gaussian(1, 1, random)[0];
  for (float& x : p.w2) x += 0.3F * gaussian(1, 1, random)[0];
  for (float& x : p.b2) x += gaussian(1, 1, random)[0];
  const double loss = mlp.learn(data.batch());
  EXPECT_NEAR(loss, loss_of(data, p, data.inputs), 1e-5);
  const QueryMlp::Parameters gradient = mlp.gradient();
  const auto check = [&](std::vector<float> QueryMlp::Parameters::*array, const char* name) {
    for (size_t i = 0; i < (p.*array).size(); ++i) {
      QueryMlp::Parameters moved = p;
      const float step = 1e-3F;
      float& x = (moved.*array)[i];
      const float before = x;
      x = before + step;
      const double up_step = double{x} - before;
      const double up = loss_of(data, moved, data.inputs);
      x = before - step;
      const double down = loss_of(data, moved, data.inputs);
      const double slope = (up - down) / (up_step + (double{before} - x));
      // A unit on the edge of its ReLU may have either slope: tolerance of a few such steps.
      ASSERT_NEAR((gradient.*array)[i], slope, 2e-4 + 0.02 * std::abs(slope)) << name << " " << i;
    }
  };
  check(&QueryMlp::Parameters::w1, "w1");
  check(&QueryMlp::Parameters::gamma, "gamma");
  check(&QueryMlp::Parameters::beta, "beta");
  check(&QueryMlp::Parameters::w2, "w2");
  check(&QueryMlp::Parameters::b2, "b2");
  check(&QueryMlp::Parameters::w3, "w3");
}

TEST(QueryMlp, FoldedItIsTheNetworkWithItsRunningStatistics) {
  std::mt19937 random(4);
  const MlpShape shape = {8, 16, 5};
  const Data data(shape, 64, random);
  QueryMlp mlp(shape, gaussian(5 * 8, 0.1F, random), data.inputs.data(), data.size, 6);
  // On one and the same batch the running statistics become those of the batch (its variance unbiased, which
  // is 1.6 % more).
  for (int i = 0; i < 400; ++i) (void)mlp.learn(data.batch());
  std::vector<float> log_p;
  mlp.fold().log_probabilities(data.inputs.data(), data.priors.data(), data.size, log_p);
  double loss = 0;
  double total = 0;
  for (size_t i = 0; i < data.size; ++i) {
    double sum = 0;
    for (size_t c = 0; c < 5; ++c) {
      const double t = data.targets[i * 5 + c];
      if (t > 0) loss += data.weights[i] * t * (std::log(t) - log_p[i * 5 + c]);
      sum += std::exp(double{log_p[i * 5 + c]});
    }
    EXPECT_NEAR(sum, 1, 1e-4);
    total += data.weights[i];
  }
  EXPECT_NEAR(loss / total, mlp.learn(data.batch()), 2e-2);
}

TEST(QueryMlp, AdamLearnsABatchByHeart) {
  std::mt19937 random(5);
  const MlpShape shape = {8, 64, 5};
  const Data data(shape, 40, random);
  QueryMlp mlp(shape, std::vector<float>(5 * 8), data.inputs.data(), data.size, 7);
  const double before = mlp.learn(data.batch());
  for (int i = 0; i < 300; ++i) {
    mlp.adam_step(0.01F, 0.0F);
    (void)mlp.learn(data.batch());
  }
  EXPECT_LT(mlp.learn(data.batch()), 0.1 * before);
}

}  // namespace
}  // namespace keyhole::tools
