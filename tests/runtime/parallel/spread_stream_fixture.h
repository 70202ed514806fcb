// For tests of spread sessions with tensors in device memory: ranks that are threads with a device and a stream each,
// steps, graphs.
#pragma once

#include <cmath>
#include <functional>
#include <memory>

#include "keyhole/stream.h"
#include "tests/runtime/parallel/stream_ranks.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {

using Rows = std::vector<float>;

/// One rank: its communicator, and an engine over it with a device.
struct StreamRank {
  StreamRank(StreamRanks& ranks, uint32_t rank, keyhole_engine_config config, uint32_t block,
             bool gathers = true, uint32_t timeout_ms = 0) {
    const keyhole_transport t = ranks.transport(rank, gathers);
    keyhole_communicator_config cc;
    keyhole_communicator_config_init(&cc);
    cc.timeout_ms = timeout_ms;
    keyhole_communicator* made = nullptr;
    EXPECT_OK(keyhole_communicator_create(&t, &cc, &made));
    communicator.reset(made);
    config.communicator = made;
    config.context_block = block;
    device = std::make_unique<StreamEngine>(config);
    ranks.attach(rank, device->stream);
  }
  [[nodiscard]] keyhole_engine* engine() const { return device->handle.get(); }

  CommunicatorPtr communicator;
  std::unique_ptr<StreamEngine> device;
};

/// A step of a layer whose tensors live until the stream has done it.
struct Step {
  Step(const Shape& shape, Numbers& numbers, bool appends)
      : q(numbers.many(shape.q(1))),
        k(appends ? numbers.many(shape.kv(1)) : Rows()),
        v(appends ? numbers.many(shape.v(1)) : Rows()),
        o(shape.o(1), NAN),
        lse(static_cast<size_t>(shape.hq), NAN) {}

  keyhole_status enqueue(keyhole_session* s, const Shape& shape, uint32_t layer, bool halves) {
    const auto tq = on_device(q, {shape.hq, shape.d}), out = on_device(o, {shape.hq, shape.dv});
    const auto tk = on_device(k, {shape.hkv, shape.d}), tv = on_device(v, {shape.hkv, shape.dv});
    const keyhole_tensor* const keys = k.empty() ? nullptr : &tk;
    const keyhole_tensor* const values = k.empty() ? nullptr : &tv;
    if (!halves) return keyhole_session_attend(s, layer, &tq, keys, values, &out, lse.data());
    const keyhole_status begun = keyhole_session_attend_begin(s, layer, &tq, keys, values);
    return begun != KEYHOLE_OK ? begun : keyhole_session_attend_end(s, &out, lse.data());
  }
  /// Replaces the numbers in place.
  void refill(const Shape& shape, Numbers& numbers) {
    const Step other(shape, numbers, !k.empty());
    std::copy(other.q.begin(), other.q.end(), q.begin());
    std::copy(other.k.begin(), other.k.end(), k.begin());
    std::copy(other.v.begin(), other.v.end(), v.begin());
    std::fill(o.begin(), o.end(), NAN);
  }
  /// Compares the answer with the model's, which takes the token in.
  void expect_exact(Model& model, uint32_t layer) const {
    if (!k.empty()) model.append(layer, k, v);
    std::vector<double> sums;
    const auto truth = model.attend_all(layer, q, sums);
    expect_near({o, lse}, truth, sums);
  }

  Rows q, k, v, o, lse;
};

/// A graph of tokens that go through all layers, and are appended.
class Graph {
 public:
  Graph(const Shape& shape, uint32_t layers, uint32_t tokens, Numbers& numbers)
      : shape_(shape), layers_(layers) {
    for (uint32_t i = 0; i < tokens * layers; ++i) {
      steps_.push_back(std::make_unique<Step>(shape, numbers, true));
    }
  }
  /// Captures the graph if it was not captured yet or the session says that it must be again, and launches it with
  /// new numbers.
  void launch(StreamRank& rank, keyhole_session* s, Numbers& numbers) {
    for (const auto& step : steps_) step->refill(shape_, numbers);
    keyhole_status status = captures_ == 0 ? KEYHOLE_INVALID_ARGUMENT : keyhole_session_announce(s);
    if (status == KEYHOLE_INVALID_ARGUMENT) {
      capture(rank, s);
      status = keyhole_session_announce(s);
    }
    ASSERT_OK(status);
    rank.device->stream.launch_graph();
  }
  void capture(StreamRank& rank, keyhole_session* s) {
    ++captures_;
    FakeStream& stream = rank.device->stream;
    stream.begin_capture();
    for (uint32_t i = 0; i < steps_.size(); ++i) {
      EXPECT_OK(steps_[i]->enqueue(s, shape_, i % layers_, i % 3 == 2));
    }
    stream.end_capture();
  }
  [[nodiscard]] uint32_t captures() const { return captures_; }
  [[nodiscard]] const std::vector<std::unique_ptr<Step>>& steps() const { return steps_; }

 private:
  Shape shape_;
  uint32_t layers_, captures_ = 0;
  std::vector<std::unique_ptr<Step>> steps_;
};

/// Runs with two ranks whose sessions hold 30 tokens of each layer, in blocks of 8: the next two tokens are rank 1's.
using Part =
    std::function<void(uint32_t rank, StreamRank& its, keyhole_session* session, Numbers&)>;
inline void on_two_ranks(const Part& part, uint32_t timeout_ms = 0, StreamRanks* given = nullptr) {
  StreamRanks own(2);
  StreamRanks& ranks = given == nullptr ? own : *given;
  ranks.host.run([&](uint32_t r) {
    StreamRank rank(ranks, r, small_engine(1), 8, true, timeout_ms);
    keyhole_session_config sc = small_session();
    sc.mode = KEYHOLE_MODE_EXACT;
    const SessionPtr s = make_session(rank.engine(), sc);
    Numbers numbers(9);
    Model model(small_engine());
    const Shape shape(small_engine());
    for (uint32_t l = 0; l < 2; ++l) prefill_both(s.get(), model, shape, l, 30, numbers);
    part(r, rank, s.get(), numbers);
  });
}

}  // namespace keyhole::test
