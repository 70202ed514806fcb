// Steps of bench-step through a session on the host: times are there, and errors are those of exact attention
// written out here.
#include "tools/commands/bench_step/step_runner.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/files/float16.h"

namespace keyhole::tools {
namespace {

constexpr uint64_t kRunnerContext = 300;
const StepShape kShape{2, 4, 2, 64};

struct Prepared {
  Engine engine;
  Session session;
  StepInputs inputs;
  std::vector<std::vector<uint16_t>> k, v;  ///< by layer, with the tokens of the steps
};

Prepared prepare(uint32_t top_k) {
  Prepared p;
  keyhole_engine_config engine;
  keyhole_engine_config_init(&engine);
  engine.layers = kShape.layers;
  engine.q_heads = kShape.q_heads;
  engine.kv_heads = kShape.kv_heads;
  engine.head_dim = kShape.head_dim;
  engine.device = KEYHOLE_DEVICE_HOST;
  engine.threads = 2;
  p.engine = make_engine(engine);
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  config.max_tokens = kRunnerContext + 3;
  config.sink = 4;
  config.window = 32;
  config.flush_block = 8;
  config.index = "flat";  // codes would have rows read exactly until nothing is amiss
  config.budget.top_k = top_k;
  p.session = make_session(p.engine, config);
  p.inputs.shape = kShape;
  p.inputs.tokens = 3;
  p.inputs.rows.resize(3 * kShape.layers * kShape.token_elements());
  const auto source = make_synthetic_source(kShape.head_dim, 6);
  Team team(1);
  for (uint32_t layer = 0; layer < kShape.layers; ++layer) {
    LayerData data(*source, kShape, TurnKind::rotate, 6, layer, kRunnerContext, team);
    std::vector<uint16_t> k(kRunnerContext * kShape.kv_elements());
    std::vector<uint16_t> v(k.size());
    data.rows(0, kRunnerContext, k.data(), v.data());
    const int64_t shape[] = {kRunnerContext, kShape.kv_heads, kShape.head_dim};
    const keyhole_tensor tk = keyhole_tensor_host(k.data(), KEYHOLE_F16, 3, shape);
    const keyhole_tensor tv = keyhole_tensor_host(v.data(), KEYHOLE_F16, 3, shape);
    check(keyhole_session_append(p.session.get(), layer, &tk, &tv, nullptr));
    for (uint32_t token = 0; token < 3; ++token) {
      uint16_t* step = p.inputs.at(token, layer);
      data.step(token, step);
      const uint16_t* new_k = step + kShape.q_elements();
      const uint16_t* new_v = new_k + kShape.kv_elements();
      k.insert(k.end(), new_k, new_v);
      v.insert(v.end(), new_v, new_v + kShape.kv_elements());
    }
    p.k.push_back(std::move(k));
    p.v.push_back(std::move(v));
  }
  check(keyhole_session_build(p.session.get(), nullptr, nullptr));
  return p;
}

double exact_error(const Prepared& p, const std::vector<uint16_t>& out, uint32_t token,
                   uint32_t layer, uint32_t head) {
  const size_t d = kShape.head_dim;
  const size_t kv = head / kShape.group();
  const uint16_t* q = p.inputs.at(token, layer) + head * d;
  std::vector<double> o(d);
  double sum = 0;
  for (size_t t = 0; t <= kRunnerContext + token; ++t) {
    const size_t row = (t * kShape.kv_heads + kv) * d;
    double score = 0;
    for (size_t i = 0; i < d; ++i) {
      score += double{f16_to_f32(q[i])} * f16_to_f32(p.k[layer][row + i]);
    }
    const double weight = std::exp(score / std::sqrt(static_cast<double>(d)));
    sum += weight;
    for (size_t i = 0; i < d; ++i) o[i] += weight * f16_to_f32(p.v[layer][row + i]);
  }
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < d; ++i) {
    difference += std::pow(f16_to_f32(out[head * d + i]) - o[i] / sum, 2);
    size += std::pow(o[i] / sum, 2);
  }
  return std::sqrt(difference / size);
}

TEST(StepRunner, ErrorsAreThoseOfExactAttention) {
  for (const uint32_t top_k : {1U, 8U, 400U}) {
    Prepared p = prepare(top_k);
    const auto runner = make_host_runner(p.inputs);
    runner->use(p.session.get());
    double largest = 0;
    for (uint32_t token = 0; token < 3; ++token) {
      const TokenTimes times = runner->run(p.session.get(), token, kShape.layers);
      ASSERT_EQ(times.layers.size(), kShape.layers);
      EXPECT_GT(times.layers[0], 0);
      EXPECT_GE(times.token, times.layers[0] + times.layers[1]);
      check_outputs(*runner, kShape.layers);
      for (uint32_t layer = 0; layer < kShape.layers; ++layer) {
        const std::vector<double> errors =
            output_errors(*runner, p.inputs, p.session.get(), token, layer);
        ASSERT_EQ(errors.size(), kShape.q_heads);
        for (uint32_t h = 0; h < kShape.q_heads; ++h) {
          EXPECT_NEAR(errors[h], exact_error(p, runner->output(layer), token, layer, h), 1e-3);
          largest = std::max(largest, errors[h]);
        }
      }
    }
    if (top_k == 400) {
      EXPECT_LT(largest, 2e-3);
    } else {
      EXPECT_GT(largest, 1e-2);
    }
  }
}

TEST(StepRunner, OutputsThatAreNotFiniteAreRefused) {
  class Broken final : public StepRunner {
   public:
    void use(keyhole_session*) override {}
    TokenTimes run(keyhole_session*, uint32_t, uint32_t) override { return {}; }
    void capture(keyhole_session*, uint32_t) override {}
    std::vector<uint16_t> output(uint32_t layer) override {
      return {0x3c00, layer == 1 ? uint16_t{0x7e00} : uint16_t{0x3c00}};
    }
  } runner;
  EXPECT_NO_THROW(check_outputs(runner, 1));
  EXPECT_THROW(check_outputs(runner, 2), std::runtime_error);
}

}  // namespace
}  // namespace keyhole::tools
