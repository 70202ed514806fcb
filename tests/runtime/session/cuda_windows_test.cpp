// Sliding layers on the machine's CUDA device through the C API, beside attention in double precision: tensors in host
// and in device memory, prompts, graphs, drafts, copies of sessions, limits.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "gpu/device.h"
#include "keyhole/save.h"
#include "tests/captured_graph.h"
#include "tests/runtime/device_turn.h"
#include "tests/runtime/device_vector.h"

namespace keyhole::test {
namespace {

constexpr double kTolerance =
    1e-2;  // of values up to 4, where another token would change the answer by 0.05

class CudaWindows : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    config_ = small_engine(4);
    config_.layers = 3;
    config_.head_dim = 128;
    config_.q_heads = 8;
    config_.device = KEYHOLE_DEVICE_CUDA;
    config_.timeout_ms = 2000;
    layers_.resize(3);
    for (keyhole_layer_config& l : layers_) keyhole_layer_config_init(&l, &config_);
    layers_[1].window = 40, layers_[1].window_slack = 12;
    layers_[2].window = 7, layers_[2].window_slack = 12;
    layers_[1].softcap = 6.0F;
    // Logits of a few units, so that many tokens count.
    for (keyhole_layer_config& l : layers_) l.scale = 0.01F;
    config_.layer_configs = layers_.data();
    config_.layer_count = 3;
    config_.sink_logits = sinks_.data();
  }
  void TearDown() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] Shape shape() const { return Shape(config_); }

  SessionPtr session(keyhole_engine* engine) {
    keyhole_session_config c = small_session();
    c.mode = KEYHOLE_MODE_EXACT;
    SessionPtr s = make_session(engine, c);
    EXPECT_OK(keyhole_session_set_stream(s.get(), stream_));
    return s;
  }

  /// Tokens of a layer in device memory.
  struct Turn : DeviceTurn<DeviceVector> {
    Turn(const Shape& of, uint32_t in, uint32_t n, Numbers& numbers)
        : DeviceTurn(of, n, numbers), layer(in) {}
    uint32_t layer;
  };
  /// Draws new numbers for the tokens.
  void set(Turn& t) {
    t.host = new_tokens(t.shape, t.host.n, numbers_);
    t.fill(stream_);
  }
  /// Appends the turn to the model; its answers are the model's.
  void expect_turn(Model& model, Turn& t, const uint64_t* mask = nullptr) {
    t.fetch();
    model.append(t.layer, t.host.k, t.host.v);
    expect_answers(model, t.shape, t.layer, t.host, mask, kTolerance);
  }
  std::vector<std::unique_ptr<Turn>> turns(uint32_t n) {
    std::vector<std::unique_ptr<Turn>> all;
    for (uint32_t l = 0; l < 3; ++l) {
      all.push_back(std::make_unique<Turn>(shape(), l, n, numbers_));
      all.back()->fill(stream_);
    }
    return all;
  }
  void decode(keyhole_session* s, Model& model, uint32_t tokens) {
    for (uint32_t i = 0; i < tokens; ++i) {
      const auto all = turns(1);
      for (const auto& t : all) ASSERT_OK(t->attend(s, t->layer, i % 2 == 1));
      ASSERT_OK(keyhole_session_synchronize(s));
      for (const auto& t : all) expect_turn(model, *t);
      if (HasFatalFailure()) return;
    }
  }
  void prefill(keyhole_session* s, Model& model, uint32_t tokens) {
    for (const auto& t : turns(tokens)) {
      ASSERT_OK(t->append(s, t->layer));
      model.append(t->layer, t->host.k, t->host.v);
    }
  }
  void expect_exact_on_host(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < 3; ++l) {
      const auto q = numbers_.many(shape().q(1));
      std::vector<double> lse;
      const auto o = model.attend_all(l, q, lse);
      expect_near(attend_only(s, shape(), l, q), o, lse, kTolerance);
    }
  }

  cudaStream_t stream_ = nullptr;
  keyhole_engine_config config_{};
  std::vector<keyhole_layer_config> layers_;
  std::vector<float> sinks_ = std::vector<float>(24, 0.5F);
  Numbers numbers_{31};
};

TEST_F(CudaWindows, DecodeWithTensorsInEitherMemory) {
  for (const keyhole_dtype dtype : {KEYHOLE_F16, KEYHOLE_BF16, KEYHOLE_F32}) {
    config_.kv_dtype = dtype;
    const EnginePtr engine = make_engine(config_);
    const SessionPtr s = session(engine.get());
    Model model(config_);
    const uint64_t before = statistics(s.get()).device_bytes;
    decode(s.get(), model, 60);
    EXPECT_GT(statistics(s.get()).device_bytes, before);
    EXPECT_EQ(statistics(s.get()).stream_steps, 180U);
    expect_exact_on_host(s.get(), model);
    decode(s.get(), model, 5);
    prefill(s.get(), model, 100);
    decode(s.get(), model, 50);
    ASSERT_OK(keyhole_session_truncate(s.get(), model.tokens(0) - 9));
    model.truncate(model.tokens(0) - 9);
    decode(s.get(), model, 30);
    expect_exact_on_host(s.get(), model);
  }
}

TEST_F(CudaWindows, DraftsAreAcceptedOnTheStream) {
  const EnginePtr engine = make_engine(config_);
  const SessionPtr s = session(engine.get());
  Model model(config_);
  prefill(s.get(), model, 90);
  for (uint32_t round = 0; round < 12; ++round) {
    const auto all = turns(6);
    for (const auto& t : all) ASSERT_OK(t->extend(s.get(), t->layer));
    const uint32_t path[] = {0, 2, 5};
    const bool by_path = round % 2 == 1;
    ASSERT_OK(keyhole_session_accept(s.get(), 3, by_path ? path : nullptr));
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const auto& t : all) expect_turn(model, *t);
    if (HasFatalFailure()) return;
    const std::vector<uint32_t> kept =
        by_path ? std::vector<uint32_t>{0, 2, 5} : std::vector<uint32_t>{0, 1, 2};
    for (const auto& t : all) model.keep(t->layer, 6, kept);
    decode(s.get(), model, 2);
  }
  expect_exact_on_host(s.get(), model);
}

TEST_F(CudaWindows, TreesOfDraftsOnTheStreamAndInGraphs) {
  config_.signal = KEYHOLE_SIGNAL_WAIT;
  const EnginePtr engine = make_engine(config_);
  const SessionPtr s = session(engine.get());
  Model model(config_);
  prefill(s.get(), model, 90);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const uint64_t mask[] = {1, 3, 5, 13, 17, 51, 71};
  const std::vector<uint32_t> path = {0, 2, 3};
  // The sliding layers, which alone take a mask in a capture where nothing is attended by codes.
  std::vector<std::unique_ptr<Turn>> sliding;
  for (const uint32_t layer : {1U, 2U}) {
    sliding.push_back(std::make_unique<Turn>(shape(), layer, 7, numbers_));
    sliding.back()->fill(stream_);
  }
  const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    for (const auto& t : sliding) EXPECT_OK(t->extend(s.get(), t->layer, mask));
  });
  for (uint32_t round = 0; round < 20; ++round) {
    const bool by_graph = round % 2 == 0;
    for (const auto& t : sliding) set(*t);
    if (by_graph) {
      ASSERT_OK(keyhole_session_announce(s.get()));
      graph.launch();
    } else {
      for (const auto& t : sliding) ASSERT_OK(t->extend(s.get(), t->layer, mask));
    }
    ASSERT_OK(keyhole_session_accept(s.get(), 3, path.data()));
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const auto& t : sliding) {
      expect_turn(model, *t, mask);
      model.keep(t->layer, 7, path);
    }
    if (HasFatalFailure()) break;
  }
  expect_exact_on_host(s.get(), model);
}

TEST_F(CudaWindows, GraphsAreLaunchedOften) {
  config_.signal = KEYHOLE_SIGNAL_WAIT;
  const EnginePtr engine = make_engine(config_);
  const SessionPtr s = session(engine.get());
  Model model(config_);
  prefill(s.get(), model, 30);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const auto all = turns(1);
  // The first that the windows are on the device.
  const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    for (const auto& t : all) EXPECT_OK(t->attend(s.get(), t->layer, false));
  });
  for (uint32_t i = 0; i < 90; ++i) {
    for (const auto& t : all) set(*t);
    ASSERT_OK(keyhole_session_announce(s.get()));
    graph.launch();
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const auto& t : all) expect_turn(model, *t);
    if (HasFatalFailure()) break;
    // What moves them to the host, or takes some of them, moves them back when the graph is announced.
    if (i % 20 == 7) expect_exact_on_host(s.get(), model);
    if (i % 20 == 13) {
      ASSERT_OK(keyhole_session_truncate(s.get(), model.tokens(0) - 3));
      model.truncate(model.tokens(0) - 3);
    }
  }
}

TEST_F(CudaWindows, AreCopiedWithTheirSession) {
  const EnginePtr engine = make_engine(config_);
  const SessionPtr s = session(engine.get());
  const auto path =
      std::filesystem::temp_directory_path() / ("keyhole_cuda_windows_" + std::to_string(getpid()));
  Model model(config_);
  prefill(s.get(), model, 45);
  for (int round = 0; round < 3; ++round) {
    decode(s.get(), model, 25);
    const SessionPtr fork = fork_of(s.get());
    ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
    const SessionPtr loaded = load_of(engine.get(), path);
    for (keyhole_session* copy : {fork.get(), loaded.get()}) {
      ASSERT_OK(keyhole_session_set_stream(copy, stream_));
      Model own = model;
      ASSERT_OK(keyhole_session_truncate(copy, own.tokens(0) - 10)) << "the slack is copied, too";
      own.truncate(own.tokens(0) - 10);
      decode(copy, own, 12);
    }
  }
  std::filesystem::remove(path);
}

TEST_F(CudaWindows, SayWhatIsNotFinite) {
  const EnginePtr engine = make_engine(config_);
  const SessionPtr s = session(engine.get());
  Turn t(shape(), 2, 1, numbers_);
  t.host.k[140] = NAN;
  t.fill(stream_);
  ASSERT_OK(t.attend(s.get(), t.layer, false));
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
  expect_error_text("tensor k of step 1 of layer 2, KV head 1");
}

}  // namespace
}  // namespace keyhole::test
