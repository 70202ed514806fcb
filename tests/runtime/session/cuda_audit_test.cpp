// Audits of steps on a stream of the machine's CUDA device, beside exact attention in double precision over what the
// steps wrote; and that keeping answers changes none of them.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "gpu/device.h"
#include "keyhole/stream.h"
#include "tests/captured_graph.h"
#include "tests/relative_error.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

/// A step's tensors of a layer in device memory.
struct LayerTensors {
  explicit LayerTensors(const keyhole_engine_config& c)
      : q(size_t{c.q_heads} * c.head_dim),
        k(size_t{c.kv_heads} * c.head_dim),
        v(size_t{c.kv_heads} * c.head_dim),
        out(size_t{c.q_heads} * c.head_dim),
        lse(c.q_heads) {}
  DeviceVector q, k, v, out, lse;
  std::vector<float> host_q, host_k, host_v;
};

class CudaAudit : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    config_ = small_engine(4);
    config_.head_dim = 128;
    config_.q_heads = 8;
    config_.device = KEYHOLE_DEVICE_CUDA;
    config_.timeout_ms = 2000;
    engine_ = make_engine(config_);
    for (uint32_t l = 0; l < config_.layers; ++l) {
      layers_.push_back(std::make_unique<LayerTensors>(config_));
    }
  }
  void TearDown() override {
    layers_.clear();
    engine_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  static keyhole_session_config coded(uint32_t bits, double share) {
    keyhole_session_config c = small_session();
    spec_ = "codes:k=" + std::to_string(bits) + ",v=" + std::to_string(bits);
    c.index = spec_.c_str();
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.flush_block = 256;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    c.audit_share = share;
    return c;
  }
  SessionPtr make(const keyhole_session_config& c, Model& model, uint32_t tokens) {
    numbers_ = Numbers(11);
    SessionPtr s = make_session(engine_.get(), c);
    for (uint32_t l = 0; l < config_.layers; ++l) {
      prefill_both(s.get(), model, Shape(config_), l, tokens, numbers_);
    }
    EXPECT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    EXPECT_OK(keyhole_session_set_stream(s.get(), stream_));
    EXPECT_OK(keyhole_session_synchronize(s.get()));
    return s;
  }
  /// New numbers in the tensors of all layers.
  void fill() {
    for (const auto& l : layers_) {
      l->host_q = numbers_.many(size_t{config_.q_heads} * config_.head_dim);
      for (float& x : l->host_q) x *= 0.125F;
      l->host_k = numbers_.many(size_t{config_.kv_heads} * config_.head_dim);
      l->host_v = numbers_.many(l->host_k.size());
      l->q.set(l->host_q, stream_);
      l->k.set(l->host_k, stream_);
      l->v.set(l->host_v, stream_);
    }
  }
  void enqueue(keyhole_session* s, bool halves) {
    const int64_t hq = config_.q_heads, hkv = config_.kv_heads, d = config_.head_dim;
    for (uint32_t l = 0; l < config_.layers; ++l) {
      LayerTensors& t = *layers_[l];
      const keyhole_tensor q = t.q.tensor({hq, d}), k = t.k.tensor({hkv, d}),
                           v = t.v.tensor({hkv, d}), out = t.out.tensor({hq, d});
      auto* lse = static_cast<float*>(t.lse.tensor({hq}).data);
      if (halves) {
        ASSERT_OK(keyhole_session_attend_begin(s, l, &q, &k, &v));
        ASSERT_OK(keyhole_session_attend_end(s, &out, lse));
      } else {
        ASSERT_OK(keyhole_session_attend(s, l, &q, &k, &v, &out, lse));
      }
    }
  }
  /// Audits of one step of all heads, beside what the step wrote.
  void expect_found(keyhole_session* s, Model& model, bool codes) {
    const uint32_t group = config_.q_heads / config_.kv_heads;
    for (uint32_t l = 0; l < config_.layers; ++l) {
      model.append(l, layers_[l]->host_k, layers_[l]->host_v);
      std::vector<double> true_lse;
      const auto truth = model.attend_all(l, layers_[l]->host_q, true_lse);
      const std::vector<float> out = layers_[l]->out.get(), lse = layers_[l]->lse.get();
      for (uint32_t kv = 0; kv < config_.kv_heads; ++kv) {
        double error = 0.0, worst = 0.0, mass = 0.0;
        for (uint32_t h = kv * group; h < (kv + 1) * group; ++h) {
          const size_t begin = size_t{h} * config_.head_dim;
          const double one = relative_error(&out[begin], &truth[begin], config_.head_dim);
          error += one / group;
          worst = std::max(worst, one);
          mass += std::min(1.0, std::exp(lse[h] - true_lse[h])) / group;
        }
        keyhole_audit a;
        keyhole_audit_init(&a);
        ASSERT_OK(keyhole_session_get_audit(s, l, kv, &a));
        ASSERT_EQ(a.audits, group) << "layer " << l << ", KV head " << kv;
        ASSERT_TRUE(std::isfinite(error));  // limits below grow with it
        EXPECT_NEAR(a.error_mean, error, 1e-4 + 1e-3 * error);
        EXPECT_NEAR(a.error_max, worst, 1e-4 + 1e-3 * worst);
        EXPECT_LE(a.error_max, a.error_p99 * 1.04 + 1e-9);
        if (codes) {
          EXPECT_NEAR(a.mass_mean, mass, 1e-3);
          EXPECT_EQ(a.recall, 0.0);
        } else {
          EXPECT_GT(a.recall, 0.0);
        }
      }
    }
  }
  /// Steps of both kinds and in a graph.
  void run(keyhole_session* s, Model& model, bool codes) {
    const auto step = [&](auto&& launch) {
      fill();
      ASSERT_OK(keyhole_session_reset_statistics(s));
      launch();
      ASSERT_OK(keyhole_session_synchronize(s));
      expect_found(s, model, codes);
    };
    for (int i = 0; i < 6; ++i) step([&] { enqueue(s, i % 2 == 1); });
    if (statistics(s).signal != std::string("wait") || HasFailure()) return;
    const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal,
                              [&] { enqueue(s, false); });
    for (int i = 0; i < 10; ++i) {
      step([&] {
        ASSERT_OK(keyhole_session_announce(s));
        graph.launch();
      });
    }
    // Without a wait in between, across a flush of the window: nothing is lost.
    ASSERT_OK(keyhole_session_reset_statistics(s));
    for (int i = 0; i < 300; ++i) {
      ASSERT_OK(keyhole_session_announce(s));
      graph.launch();
    }
    keyhole_audit a;
    keyhole_audit_init(&a);
    ASSERT_OK(keyhole_session_get_audit(s, KEYHOLE_ALL, KEYHOLE_ALL, &a));
    EXPECT_EQ(a.audits, uint64_t{300} * config_.layers * config_.q_heads);
    EXPECT_TRUE(std::isfinite(a.error_max));
  }

  static inline std::string spec_;
  cudaStream_t stream_ = nullptr;
  keyhole_engine_config config_{};
  EnginePtr engine_;
  Numbers numbers_{11};
  std::vector<std::unique_ptr<LayerTensors>> layers_;
};

TEST_F(CudaAudit, FiguresOfCodesEqualAnOfflineComputation) {
  for (const uint32_t bits : {2U, 4U}) {
    Model model(config_);
    SessionPtr s = make(coded(bits, 1.0), model, 1500);
    run(s.get(), model, true);
    if (HasFailure()) return;
  }
}

TEST_F(CudaAudit, FiguresOfStepsThatTheHostServes) {
  for (const keyhole_tail_mode tail : {KEYHOLE_TAIL_NONE, KEYHOLE_TAIL_CENTROID}) {
    keyhole_session_config c = small_session();
    c.budget.top_k = 40;
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    c.audit_share = 1.0;
    if (tail != KEYHOLE_TAIL_NONE) {
      c.budget.tail = tail;
      c.budget.attend = KEYHOLE_ATTEND_NONE;
      c.budget.min_keys = c.budget.max_keys = 200;
    }
    Model model(config_);
    SessionPtr s = make(c, model, 900);
    run(s.get(), model, false);
    if (HasFailure()) return;
  }
}

// No bit of what a step wrote, in the caller's dtype too, depends on whether it is audited.
TEST_F(CudaAudit, KeepingAnswersChangesNone) {
  const int64_t hq = config_.q_heads, hkv = config_.kv_heads, d = config_.head_dim;
  std::vector<std::vector<float>> seen[2];
  for (int audited = 0; audited < 2; ++audited) {
    Model model(config_);
    SessionPtr s = make(coded(2, audited), model, 1500);
    for (int i = 0; i < 20; ++i) {
      fill();
      for (uint32_t l = 0; l < config_.layers; ++l) {
        LayerTensors& t = *layers_[l];
        const keyhole_tensor q = t.q.tensor({hq, d}), k = t.k.tensor({hkv, d}),
                             v = t.v.tensor({hkv, d});
        keyhole_tensor out = t.out.tensor({hq, d});
        out.dtype = i % 3 == 0 ? KEYHOLE_F32 : i % 3 == 1 ? KEYHOLE_F16 : KEYHOLE_BF16;
        t.out.set(std::vector<float>(static_cast<size_t>(hq * d), 0.0F), stream_);
        auto* lse = i % 2 == 0 ? nullptr : static_cast<float*>(t.lse.tensor({hq}).data);
        ASSERT_OK(keyhole_session_attend(s.get(), l, &q, &k, &v, &out, lse));
        ASSERT_OK(keyhole_session_synchronize(s.get()));
        seen[audited].push_back(t.out.get());
        seen[audited].push_back(t.lse.get());
      }
    }
  }
  ASSERT_EQ(seen[0].size(), seen[1].size());
  for (size_t i = 1; i < seen[0].size(); ++i) {  // lse is not written before the second step
    if (i < 2 * config_.layers && i % 2 == 1) continue;
    ASSERT_EQ(std::memcmp(seen[0][i].data(), seen[1][i].data(), seen[0][i].size() * sizeof(float)),
              0)
        << i;
  }
}

}  // namespace
}  // namespace keyhole::test
