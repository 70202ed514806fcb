#include "tools/commands/step_runner.h"

#include <chrono>
#include <stdexcept>
#include <string>

namespace keyhole::tools {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

keyhole_tensor rows_tensor(const void* data, uint32_t heads, uint32_t dim, keyhole_memory memory) {
  const int64_t shape[] = {heads, dim};
  keyhole_tensor tensor = keyhole_tensor_host(data, KEYHOLE_F16, 2, shape);
  tensor.memory = memory;
  return tensor;
}

void attend(keyhole_session* session, uint32_t layer, const StepShape& shape, const void* q,
            const void* k, const void* v, void* out, keyhole_memory memory) {
  const keyhole_tensor tq = rows_tensor(q, shape.q_heads, shape.head_dim, memory);
  const keyhole_tensor tk = rows_tensor(k, shape.kv_heads, shape.head_dim, memory);
  const keyhole_tensor tv = rows_tensor(v, shape.kv_heads, shape.head_dim, memory);
  const keyhole_tensor to = rows_tensor(out, shape.q_heads, shape.head_dim, memory);
  check(keyhole_attend(session, layer, &tq, &tk, &tv, &to, nullptr));
}

void check_finite(const std::vector<uint16_t>& out, uint32_t layer) {
  constexpr uint16_t kExponent = 0x7c00;
  for (const uint16_t x : out) {
    if ((x & kExponent) == kExponent) {
      throw std::runtime_error("an output of layer " + std::to_string(layer) + " is not finite");
    }
  }
}

class HostRunner final : public StepRunner {
 public:
  explicit HostRunner(const StepInputs& inputs) : inputs_(inputs), outputs_(inputs.shape.layers) {
    for (auto& out : outputs_) out.resize(inputs.shape.q_elements());
  }

  void use(keyhole_session*) override {}
  void capture(keyhole_session*, uint32_t) override {}

  TokenTimes run(keyhole_session* session, uint32_t token, uint32_t layers) override {
    TokenTimes times;
    const StepShape& shape = inputs_.shape;
    const auto start = Clock::now();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const uint16_t* q = inputs_.at(token, layer);
      const uint16_t* k = q + shape.q_elements();
      const auto begin = Clock::now();
      attend(session, layer, shape, q, k, k + shape.kv_elements(), outputs_[layer].data(),
             KEYHOLE_HOST);
      times.layers.push_back(microseconds_since(begin));
    }
    times.token = microseconds_since(start);
    return times;
  }

  void check_outputs(uint32_t layers) override {
    for (uint32_t layer = 0; layer < layers; ++layer) check_finite(outputs_[layer], layer);
  }

 private:
  const StepInputs& inputs_;
  std::vector<std::vector<uint16_t>> outputs_;  ///< by layer
};

class StreamRunner final : public StepRunner {
 public:
  StreamRunner(const StepInputs& inputs, TokenStream& stream) : inputs_(inputs), stream_(stream) {
    for (uint32_t token = 0; token < inputs.tokens; ++token) {
      for (uint32_t layer = 0; layer < inputs.shape.layers; ++layer) {
        stream.upload(token, layer, inputs.at(token, layer));
      }
    }
  }

  void use(keyhole_session* session) override {
    captured_ = false;
    check(keyhole_session_set_stream(session, stream_.stream()));
  }

  void capture(keyhole_session* session, uint32_t layers) override {
    stream_.begin_capture();
    enqueue(session, 0, layers);
    stream_.end_capture();
    captured_ = true;
  }

  TokenTimes run(keyhole_session* session, uint32_t token, uint32_t layers) override {
    const auto start = Clock::now();
    if (captured_) {
      check(keyhole_session_announce(session));
      stream_.launch(token);
    } else {
      enqueue(session, token, layers);
    }
    check(keyhole_session_synchronize(session));
    stream_.synchronize();
    TokenTimes times;
    times.token = microseconds_since(start);
    std::vector<float> attends(layers);
    float device = 0;
    stream_.read_clocks(layers, attends.data(), device);
    times.layers.assign(attends.begin(), attends.end());
    times.device = device;
    return times;
  }

  void check_outputs(uint32_t layers) override {
    for (uint32_t layer = 0; layer < layers; ++layer) check_finite(stream_.output(layer), layer);
  }

 private:
  void enqueue(keyhole_session* session, uint32_t token, uint32_t layers) {
    stream_.begin_token();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const TokenStream::Rows rows = stream_.begin_layer(token, layer);
      attend(session, layer, inputs_.shape, rows.q, rows.k, rows.v, rows.out, KEYHOLE_DEVICE);
      stream_.end_layer(layer);
    }
    stream_.end_token();
  }

  const StepInputs& inputs_;
  TokenStream& stream_;
  bool captured_ = false;
};

}  // namespace

std::unique_ptr<StepRunner> make_host_runner(const StepInputs& inputs) {
  return std::make_unique<HostRunner>(inputs);
}

std::unique_ptr<StepRunner> make_stream_runner(const StepInputs& inputs, TokenStream& stream) {
  return std::make_unique<StreamRunner>(inputs, stream);
}

}  // namespace keyhole::tools
