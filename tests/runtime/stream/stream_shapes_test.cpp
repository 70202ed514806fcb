// Layers of different shapes on the device of tests/runtime/stream_device.h: all that a session does there, beside
// attention in double precision; what the parts of each shape take of the device together, and how they fail.
#include "tests/runtime/session/shaped_device.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

/// Floats that calls take for device memory.
class HostVector {
 public:
  explicit HostVector(size_t n) : data_(n) {}
  void set(const std::vector<float>& v, void* /*stream*/) {
    std::copy(v.begin(), v.end(), data_.begin());
  }
  [[nodiscard]] std::vector<float> get() const { return data_; }
  [[nodiscard]] keyhole_tensor tensor(std::initializer_list<int64_t> shape) const {
    return on_device(data_, shape);
  }

 private:
  std::vector<float> data_;
};

class StreamWorld {
 public:
  using Vector = HostVector;
  keyhole_engine* engine(const keyhole_engine_config& c) {
    device_ = std::make_unique<StreamEngine>(c, unless_sanitized(5000, 30000));
    return device_->handle.get();
  }
  [[nodiscard]] void* stream() const { return nullptr; }
  void begin_capture() { device_->stream.begin_capture(); }
  void end_capture() { device_->stream.end_capture(); }
  void launch() { device_->stream.launch_graph(); }
  [[nodiscard]] StreamEngine& device() { return *device_; }

 private:
  std::unique_ptr<StreamEngine> device_;
};

class StreamShapes : public ::testing::TestWithParam<ShapedCase> {};

TEST_P(StreamShapes, AfterEveryOperation) {
  StreamWorld world;
  ShapedSequences<StreamWorld> sequences(world, GetParam());
  ASSERT_FALSE(HasFatalFailure());
  sequences.run(unless_sanitized(24, 12));
}

TEST_P(StreamShapes, WhatIsOffloadedIsWhereItIsToBe) {
  StreamWorld world;
  ShapedSequences<StreamWorld> sequences(world, GetParam());
  ASSERT_FALSE(HasFatalFailure());
  sequences.run_once(700);
}

/// Codes on the device, or an error.
keyhole_session_config coded() {
  keyhole_session_config c = small_session();
  c.index = "codes:k=4,v=4";
  c.flush_block = c.append_block = 256;
  c.budget.top_k = 16;
  c.budget.tail = KEYHOLE_TAIL_CODES;
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  return c;
}

TEST(StreamShape, CodesAreThereWhereTheLastLayersSlide) {
  for (const bool alike : {true, false}) {
    SCOPED_TRACE(alike);
    const Heads wide{8, 2, 128};
    ShapedConfig c({alike ? wide : Heads{4, 1, 64}, wide, alike ? wide : Heads{4, 4, 64}, wide});
    c.layers[2].window = c.layers[3].window = 20;
    StreamEngine device(c.engine);
    const SessionPtr s = make_session(device.handle.get(), coded());
    ASSERT_NE(s, nullptr);
    EXPECT_EQ(statistics(s.get()).code_layers, 2U);
    Numbers numbers(3);
    Model model(c.engine);
    for (uint32_t l = 0; l < 4; ++l) prefill_both(s.get(), model, c.shape(l), l, 600, numbers);
    for (uint32_t l = 0; l < 4; ++l) expect_exact(s.get(), model, c.shape(l), l, numbers);
  }
}

TEST(StreamShape, OneLimitIsOfAllShapesTogether) {
  ShapedConfig c({{4, 2, 64}, {8, 1, 128}, {4, 4, 256}});
  StreamEngine device(c.engine);
  keyhole_session_config sc = small_session();
  keyhole_engine_config planned = c.engine;
  planned.device = KEYHOLE_DEVICE_CUDA;
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  ASSERT_OK(keyhole_plan(&planned, &sc, 1000, 0, 0, &plan));
  sc.device_memory_limit = plan.device_bytes;
  const SessionPtr s = make_session(device.handle.get(), sc);
  EXPECT_EQ(statistics(s.get()).device_bytes, plan.device_bytes);
  EXPECT_EQ(statistics(s.get()).pinned_bytes, plan.pinned_bytes);
  sc.device_memory_limit = plan.device_bytes - 1;
  keyhole_session* none = nullptr;
  EXPECT_EQ(keyhole_session_create(device.handle.get(), &sc, &none), KEYHOLE_OUT_OF_DEVICE_MEMORY);
}

TEST(StreamShape, AHalfEndsWithTheHeadsOfItsLayer) {
  ShapedConfig c({{4, 2, 64}, {8, 1, 128}});
  StreamEngine device(c.engine);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  const Shape shape = c.shape(1), other = c.shape(0);
  Numbers numbers(5);
  NewTokens t = new_tokens(shape, 1, numbers);
  const NewTensors x(t, shape, KEYHOLE_DEVICE, true);
  std::vector<float> narrow(other.o(1));
  const keyhole_tensor wrong = on_device(narrow, {other.hq, other.d});
  ASSERT_OK(keyhole_session_attend_begin(s.get(), 1, &x.q, &x.k, &x.v));
  EXPECT_EQ(keyhole_session_attend_end(s.get(), &wrong, nullptr), KEYHOLE_INVALID_ARGUMENT);
  ASSERT_OK(keyhole_session_attend_end(s.get(), &x.out, t.answer.lse.data()));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  Model model(c.engine);
  model.append(1, t.k, t.v);
  expect_answers(model, shape, 1, t);
}

TEST(StreamShape, AFailureNamesTheModelsLayer) {
  ShapedConfig c({{4, 2, 64}, {8, 1, 128}, {4, 2, 64}, {8, 1, 128}});
  StreamEngine device(c.engine, 50);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  const Shape shape = c.shape(3);
  Numbers numbers(6);
  NewTokens t = new_tokens(shape, 1, numbers);
  const NewTensors x(t, shape, KEYHOLE_DEVICE, true);
  device.faults.loses_queries = true;
  ASSERT_OK(keyhole_session_attend(s.get(), 3, &x.q, &x.k, &x.v, &x.out, nullptr));
  EXPECT_EQ(keyhole_session_synchronize(s.get()), KEYHOLE_TIMEOUT);
  expect_error_text("layer 3");
}

std::vector<ShapedCase> all_cases() {
  std::vector<ShapedCase> all;
  uint64_t seed = 1;
  for (const Offloaded o :
       {Offloaded::flat, Offloaded::codes, Offloaded::host_codes, Offloaded::partitions}) {
    for (uint32_t i = 0; i < cases(4); ++i) {
      all.push_back({seed++, o, i % 4 == 3 ? KEYHOLE_F32 : KEYHOLE_F16, 2e-4});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Random, StreamShapes, ::testing::ValuesIn(all_cases()),
                         [](const auto& p) { return "Seed" + std::to_string(p.param.seed); });

}  // namespace
}  // namespace keyhole::test
