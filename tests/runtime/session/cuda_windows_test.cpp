// Sliding layers on the machine's CUDA device through the C API, beside attention in double precision: tensors in host and in
// device memory, prompts, graphs, drafts, copies of sessions, limits.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "gpu/device.h"
#include "keyhole/batch.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"

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

  /// n tokens of a layer in device memory.
  struct Turn {
    Turn(const Shape& of, uint32_t in, uint32_t count)
        : s(of),
          layer(in),
          n(count),
          q(s.q(n)),
          k(s.kv(n)),
          v(s.kv(n)),
          out(s.q(n)),
          lse(static_cast<size_t>(n * s.hq)) {}
    void set(Numbers& numbers, cudaStream_t stream) {
      hq = numbers.many(s.q(n));
      hk = numbers.many(s.kv(n));
      hv = numbers.many(s.kv(n));
      q.set(hq, stream);
      k.set(hk, stream);
      v.set(hv, stream);
      out.set(std::vector<float>(hq.size(), NAN), stream);
    }
    keyhole_status attend(keyhole_session* session, bool halves) {
      const auto tq = q.tensor({s.hq, s.d}), tk = k.tensor({s.hkv, s.d}),
                 tv = v.tensor({s.hkv, s.d}), to = out.tensor({s.hq, s.d});
      auto* sums = static_cast<float*>(lse.tensor({s.hq}).data);
      if (!halves) return keyhole_session_attend(session, layer, &tq, &tk, &tv, &to, sums);
      const keyhole_status status = keyhole_session_attend_begin(session, layer, &tq, &tk, &tv);
      return status != KEYHOLE_OK ? status : keyhole_session_attend_end(session, &to, sums);
    }
    keyhole_status extend(keyhole_session* session, const uint64_t* mask = nullptr) {
      const auto tq = q.tensor({n, s.hq, s.d}), tk = k.tensor({n, s.hkv, s.d}),
                 tv = v.tensor({n, s.hkv, s.d}), to = out.tensor({n, s.hq, s.d});
      return keyhole_session_extend(session, layer, &tq, &tk, &tv, mask, &to,
                                    static_cast<float*>(lse.tensor({n, s.hq}).data));
    }
    keyhole_status prefill(keyhole_session* session) {
      const auto tk = k.tensor({n, s.hkv, s.d}), tv = v.tensor({n, s.hkv, s.d});
      return keyhole_session_append(session, layer, &tk, &tv, nullptr);
    }
    Shape s;
    uint32_t layer, n;
    DeviceVector q, k, v, out, lse;
    std::vector<float> hq, hk, hv;
  };
  static std::vector<float> part(const std::vector<float>& x, size_t i, size_t size) {
    return {x.begin() + static_cast<ptrdiff_t>(i * size),
            x.begin() + static_cast<ptrdiff_t>((i + 1) * size)};
  }
  /// Appends the turn to the model; its answers are the model's.
  void expect_turn(Model& model, const Turn& t) {
    const std::vector<float> out = t.out.get(), lse = t.lse.get();
    for (uint32_t i = 0; i < t.n; ++i) {
      SCOPED_TRACE("layer " + std::to_string(t.layer) + ", token " + std::to_string(i) + " after " +
                   std::to_string(model.tokens(t.layer)));
      model.append(t.layer, part(t.hk, i, shape().kv(1)), part(t.hv, i, shape().kv(1)));
      std::vector<double> sums;
      const auto o = model.attend_all(t.layer, part(t.hq, i, shape().q(1)), sums);
      expect_near({part(out, i, shape().q(1)), part(lse, i, config_.q_heads)}, o, sums, kTolerance);
    }
  }
  /// Checks a tree of drafts, of which those at `path` remain.
  void expect_tree(Model& model, const Turn& t, const uint64_t* mask,
                   const std::vector<uint32_t>& path) {
    const std::vector<float> out = t.out.get(), lse = t.lse.get();
    const uint32_t before = model.tokens(t.layer);
    Model all = model;
    all.append(t.layer, t.hk, t.hv);
    for (uint32_t i = 0; i < t.n; ++i) {
      SCOPED_TRACE("layer " + std::to_string(t.layer) + ", draft " + std::to_string(i) + " after " +
                   std::to_string(before));
      std::vector<double> sums;
      const auto sees = [&](uint32_t token) {
        return token < before || (mask[i] >> (token - before) & 1) != 0;
      };
      const auto o = all.attend(t.layer, part(t.hq, i, shape().q(1)), sums, sees);
      expect_near({part(out, i, shape().q(1)), part(lse, i, config_.q_heads)}, o, sums, kTolerance);
    }
    for (const uint32_t i : path) {
      model.append(t.layer, part(t.hk, i, shape().kv(1)), part(t.hv, i, shape().kv(1)));
    }
  }
  std::vector<std::unique_ptr<Turn>> turns(uint32_t n) {
    std::vector<std::unique_ptr<Turn>> all;
    for (uint32_t l = 0; l < 3; ++l) {
      all.push_back(std::make_unique<Turn>(shape(), l, n));
      all.back()->set(numbers_, stream_);
    }
    return all;
  }
  void decode(keyhole_session* s, Model& model, uint32_t tokens) {
    for (uint32_t i = 0; i < tokens; ++i) {
      const auto all = turns(1);
      for (const auto& t : all) ASSERT_OK(t->attend(s, i % 2 == 1));
      ASSERT_OK(keyhole_session_synchronize(s));
      for (const auto& t : all) expect_turn(model, *t);
      if (HasFatalFailure()) return;
    }
  }
  void prefill(keyhole_session* s, Model& model, uint32_t tokens) {
    for (const auto& t : turns(tokens)) {
      ASSERT_OK(t->prefill(s));
      model.append(t->layer, t->hk, t->hv);
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
    for (const auto& t : all) ASSERT_OK(t->extend(s.get()));
    const uint32_t before = model.tokens(0), path[] = {0, 2, 5};
    const bool by_path = round % 2 == 1;
    ASSERT_OK(keyhole_session_accept(s.get(), 3, by_path ? path : nullptr));
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const auto& t : all) expect_turn(model, *t);
    if (HasFatalFailure()) return;
    model.truncate(before);
    for (const auto& t : all) {
      for (uint32_t i = 0; i < 3; ++i) {
        const uint32_t kept = by_path ? path[i] : i;
        model.append(t->layer, part(t->hk, kept, shape().kv(1)), part(t->hv, kept, shape().kv(1)));
      }
    }
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
    sliding.push_back(std::make_unique<Turn>(shape(), layer, 7));
    sliding.back()->set(numbers_, stream_);
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (const auto& t : sliding) EXPECT_OK(t->extend(s.get(), mask));
  ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (uint32_t round = 0; round < 20; ++round) {
    const bool by_graph = round % 2 == 0;
    for (const auto& t : sliding) t->set(numbers_, stream_);
    if (by_graph) {
      ASSERT_OK(keyhole_session_announce(s.get()));
      ASSERT_CUDA(cudaGraphLaunch(executable, stream_));
    } else {
      for (const auto& t : sliding) ASSERT_OK(t->extend(s.get(), mask));
    }
    ASSERT_OK(keyhole_session_accept(s.get(), 3, path.data()));
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    for (const auto& t : sliding) expect_tree(model, *t, mask, path);
    if (HasFatalFailure()) break;
  }
  expect_exact_on_host(s.get(), model);
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
}

TEST_F(CudaWindows, GraphsAreLaunchedOften) {
  config_.signal = KEYHOLE_SIGNAL_WAIT;
  const EnginePtr engine = make_engine(config_);
  const SessionPtr s = session(engine.get());
  Model model(config_);
  prefill(s.get(), model, 30);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const auto all = turns(1);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  // The first that the windows are on the device.
  ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (const auto& t : all) EXPECT_OK(t->attend(s.get(), false));
  ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (uint32_t i = 0; i < 90; ++i) {
    for (const auto& t : all) t->set(numbers_, stream_);
    ASSERT_OK(keyhole_session_announce(s.get()));
    ASSERT_CUDA(cudaGraphLaunch(executable, stream_));
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
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
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
  Turn t(shape(), 2, 1);
  t.set(numbers_, stream_);
  t.hk[140] = NAN;
  t.k.set(t.hk, stream_);
  ASSERT_OK(t.attend(s.get(), false));
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
  expect_error_text("tensor k of step 1 of layer 2, KV head 1");
}

}  // namespace
}  // namespace keyhole::test
