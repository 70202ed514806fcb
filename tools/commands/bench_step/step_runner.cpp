#include "tools/commands/bench_step/step_runner.h"

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "keyhole/stream.h"
#include "runtime/files/float16.h"
#include "tools/terminal/clock.h"

namespace keyhole::tools {
namespace {

keyhole_tensor rows_tensor(const void* data, uint32_t heads, uint32_t dim, keyhole_memory memory) {
  const int64_t shape[] = {heads, dim};
  keyhole_tensor tensor = keyhole_tensor_host(data, KEYHOLE_F16, 2, shape);
  tensor.memory = memory;
  return tensor;
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
      attend_rows(session, layer, shape, q, k, k + shape.kv_elements(), outputs_[layer].data(),
                  KEYHOLE_HOST);
      times.layers.push_back(microseconds_since(begin));
    }
    times.token = microseconds_since(start);
    return times;
  }

  std::vector<uint16_t> output(uint32_t layer) override { return outputs_[layer]; }

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
    for (const bool clocks : {true, false}) {
      stream_.begin_capture(clocks);
      enqueue(session, 0, layers);
      stream_.end_capture();
    }
    captured_ = true;
  }

  TokenTimes run(keyhole_session* session, uint32_t token, uint32_t layers) override {
    // In turn, as clocks in a graph take time of their own.
    const bool clocked = !captured_ || token % 2 == 0;
    const auto start = Clock::now();
    if (captured_) {
      check(keyhole_session_announce(session));
      stream_.launch(token, clocked);
    } else {
      enqueue(session, token, layers);
    }
    check(keyhole_session_synchronize(session));
    stream_.synchronize();
    TokenTimes times;
    const double token_time = microseconds_since(start);
    std::vector<float> attends(clocked ? layers : 0);
    float device = 0;
    stream_.read_clocks(clocked ? layers : 0, attends.data(), device);
    times.layers.assign(attends.begin(), attends.end());
    if (captured_ && clocked) return times;
    times.token = token_time;
    times.device = device;
    return times;
  }

  std::vector<uint16_t> output(uint32_t layer) override { return stream_.output(layer); }

 private:
  void enqueue(keyhole_session* session, uint32_t token, uint32_t layers) {
    stream_.begin_token();
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const TokenStream::Rows rows = stream_.begin_layer(token, layer);
      attend_rows(session, layer, inputs_.shape, rows.q, rows.k, rows.v, rows.out, KEYHOLE_DEVICE);
      stream_.end_layer(layer);
    }
    stream_.end_token();
  }

  const StepInputs& inputs_;
  TokenStream& stream_;
  bool captured_ = false;
};

}  // namespace

void attend_rows(keyhole_session* session, uint32_t layer, const StepShape& shape, const void* q,
                 const void* k, const void* v, void* out, keyhole_memory memory) {
  const keyhole_tensor tq = rows_tensor(q, shape.q_heads, shape.head_dim, memory);
  const keyhole_tensor tk = rows_tensor(k, shape.kv_heads, shape.head_dim, memory);
  const keyhole_tensor tv = rows_tensor(v, shape.kv_heads, shape.head_dim, memory);
  const keyhole_tensor to = rows_tensor(out, shape.q_heads, shape.head_dim, memory);
  check(keyhole_session_attend(session, layer, &tq, &tk, &tv, &to, nullptr));
}

void check_outputs(StepRunner& runner, uint32_t layers) {
  constexpr uint16_t kExponent = 0x7c00;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    for (const uint16_t x : runner.output(layer)) {
      if ((x & kExponent) == kExponent) {
        throw std::runtime_error("an output of layer " + std::to_string(layer) + " is not finite");
      }
    }
  }
}

std::vector<double> output_errors(StepRunner& runner, const StepInputs& inputs,
                                  keyhole_session* session, uint32_t token, uint32_t layer,
                                  const StepRanks& ranks) {
  const StepShape& shape = inputs.shape;
  const std::vector<uint16_t> written = runner.output(layer);
  std::vector<float> exact(shape.q_elements());
  const int64_t rows[] = {shape.q_heads, shape.head_dim};
  const keyhole_tensor q =
      rows_tensor(inputs.at(token, layer), shape.q_heads, shape.head_dim, KEYHOLE_HOST);
  const keyhole_tensor out = keyhole_tensor_host(exact.data(), KEYHOLE_F32, 2, rows);
  ranks.together([&] {
    check(keyhole_session_set_mode(session, KEYHOLE_MODE_EXACT, 0));
    check(keyhole_session_attend(session, layer, &q, nullptr, nullptr, &out, nullptr));
    check(keyhole_session_set_mode(session, KEYHOLE_MODE_INDEXED, 0));
  });
  exact = ranks.all_heads(std::move(exact));
  std::vector<double> errors;
  for (size_t begin = 0; begin < exact.size(); begin += shape.head_dim) {
    double difference = 0;
    double size = 0;
    for (size_t i = begin; i < begin + shape.head_dim; ++i) {
      const double off = double{f16_to_f32(written[i])} - exact[i];
      difference += off * off;
      size += double{exact[i]} * exact[i];
    }
    errors.push_back(size > 0 ? std::sqrt(difference / size) : (difference > 0 ? 1 : 0));
  }
  return errors;
}

std::unique_ptr<StepRunner> make_host_runner(const StepInputs& inputs) {
  return std::make_unique<HostRunner>(inputs);
}

std::unique_ptr<StepRunner> make_stream_runner(const StepInputs& inputs, TokenStream& stream) {
  return std::make_unique<StreamRunner>(inputs, stream);
}

}  // namespace keyhole::tools
