// Sessions on the machine's CUDA device against sessions on the host: tensors in host and in device memory, graphs,
// caps, faults.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gpu/device.h"
#include "keyhole/attention.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/captured_graph.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

class CudaSession : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    host_config_ = small_engine(4);
    host_config_.head_dim = 128;
    host_config_.q_heads = 8;
    cuda_config_ = host_config_;
    cuda_config_.device = KEYHOLE_DEVICE_CUDA;
    cuda_config_.timeout_ms = 2000;
  }
  void TearDown() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] size_t q_size() const {
    return size_t{host_config_.q_heads} * host_config_.head_dim;
  }
  [[nodiscard]] size_t kv_size() const {
    return size_t{host_config_.kv_heads} * host_config_.head_dim;
  }
  [[nodiscard]] int64_t hq() const { return host_config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return host_config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return host_config_.head_dim; }

  void prefill(keyhole_session* s, uint32_t n, uint64_t seed, bool from_device = false) {
    for (uint32_t l = 0; l < host_config_.layers; ++l) {
      Numbers numbers(seed + l);
      const auto k = numbers.many(n * kv_size()), v = numbers.many(n * kv_size()),
                 q = numbers.many(n * q_size());
      if (from_device) {
        DeviceVector dk(k.size()), dv(v.size()), dq(q.size());
        dk.set(k, stream_);
        dv.set(v, stream_);
        dq.set(q, stream_);
        const keyhole_tensor tk = dk.tensor({n, hkv(), d()}), tv = dv.tensor({n, hkv(), d()}),
                             tq = dq.tensor({n, hq(), d()});
        ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
      } else {
        const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()}),
                             tq = tensor(q, {n, hq(), d()});
        ASSERT_OK(keyhole_session_append(s, l, &tk, &tv, &tq));
      }
    }
  }

  struct Rows {
    std::vector<float> q, k, v;
  };
  Rows rows() {
    return {numbers_.many(q_size()), numbers_.many(kv_size()), numbers_.many(kv_size())};
  }

  std::vector<float> attend_host(keyhole_session* s, uint32_t layer, const Rows& r, float* lse) {
    std::vector<float> out(q_size());
    const keyhole_tensor q = tensor(r.q, {hq(), d()}), k = tensor(r.k, {hkv(), d()}),
                         v = tensor(r.v, {hkv(), d()}), o = tensor(out, {hq(), d()});
    EXPECT_OK(keyhole_session_attend(s, layer, &q, &k, &v, &o, lse));
    return out;
  }

  /// Decodes the same tokens in both sessions, in the second with tensors in device memory.
  void compare(keyhole_session* truth, keyhole_session* cuda, uint32_t tokens, double tolerance) {
    ASSERT_OK(keyhole_session_set_stream(cuda, stream_));
    const uint32_t layers = host_config_.layers;
    std::vector<std::unique_ptr<DeviceVector>> q, k, v, out, lse;
    for (uint32_t l = 0; l < layers; ++l) {
      q.push_back(std::make_unique<DeviceVector>(q_size()));
      k.push_back(std::make_unique<DeviceVector>(kv_size()));
      v.push_back(std::make_unique<DeviceVector>(kv_size()));
      out.push_back(std::make_unique<DeviceVector>(q_size()));
      lse.push_back(std::make_unique<DeviceVector>(host_config_.q_heads));
    }
    for (uint32_t t = 0; t < tokens; ++t) {
      std::vector<Rows> all;
      for (uint32_t l = 0; l < layers; ++l) {
        all.push_back(rows());
        q[l]->set(all[l].q, stream_);
        k[l]->set(all[l].k, stream_);
        v[l]->set(all[l].v, stream_);
        out[l]->set(std::vector<float>(q_size(), NAN), stream_);
      }
      for (uint32_t l = 0; l < layers; ++l) {
        const keyhole_tensor tq = q[l]->tensor({hq(), d()}), tk = k[l]->tensor({hkv(), d()}),
                             tv = v[l]->tensor({hkv(), d()}), to = out[l]->tensor({hq(), d()}),
                             tl = lse[l]->tensor({hq()});
        if (t % 2 == 0) {
          ASSERT_OK(
              keyhole_session_attend(cuda, l, &tq, &tk, &tv, &to, static_cast<float*>(tl.data)));
        } else {
          ASSERT_OK(keyhole_session_attend_begin(cuda, l, &tq, &tk, &tv));
          ASSERT_OK(keyhole_session_attend_end(cuda, &to, static_cast<float*>(tl.data)));
        }
      }
      ASSERT_OK(keyhole_session_synchronize(cuda));
      for (uint32_t l = 0; l < layers; ++l) {
        std::vector<float> truth_lse(host_config_.q_heads);
        const auto expected = attend_host(truth, l, all[l], truth_lse.data());
        const auto seen = out[l]->get(), seen_lse = lse[l]->get();
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(seen[i], expected[i], tolerance) << "token " << t << ", layer " << l;
        }
        for (size_t h = 0; h < truth_lse.size(); ++h) {
          ASSERT_NEAR(seen_lse[h], truth_lse[h], tolerance) << "token " << t << ", layer " << l;
        }
      }
    }
  }

  cudaStream_t stream_ = nullptr;
  keyhole_engine_config host_config_, cuda_config_;
  Numbers numbers_{23};
};

TEST_F(CudaSession, StepsWithTensorsInHostMemoryAgree) {
  EnginePtr a = make_engine(host_config_), b = make_engine(cuda_config_);
  SessionPtr host = make_session(a.get(), small_session()),
             cuda = make_session(b.get(), small_session());
  for (keyhole_session* s : {host.get(), cuda.get()}) {
    prefill(s, 200, 7);
    ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
  }
  for (uint32_t t = 0; t < 100; ++t) {
    const Rows r = rows();
    for (uint32_t l = 0; l < 2; ++l) {
      const auto expected = attend_host(host.get(), l, r, nullptr);
      const auto seen = attend_host(cuda.get(), l, r, nullptr);
      for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(seen[i], expected[i], 1e-3) << t;
    }
  }
}

TEST_F(CudaSession, StreamStepsAgree) {
  for (const keyhole_signal signal :
       {KEYHOLE_SIGNAL_AUTO, KEYHOLE_SIGNAL_WAIT, KEYHOLE_SIGNAL_LAUNCH}) {
    for (const char* index : {"flat", "ivf:C=8,probe=4", "roargraph:M=8,ef=64"}) {
      SCOPED_TRACE(std::string(index) + ", signal " + std::to_string(signal));
      cuda_config_.signal = signal;
      EnginePtr a = make_engine(host_config_), b = make_engine(cuda_config_);
      keyhole_session_config c = small_session();
      c.index = index;
      c.append_mode = KEYHOLE_APPEND_IN_STEP;
      SessionPtr host = make_session(a.get(), c), cuda = make_session(b.get(), c);
      prefill(host.get(), 150, 7);
      prefill(cuda.get(), 150, 7, true);
      for (keyhole_session* s : {host.get(), cuda.get()})
        ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
      compare(host.get(), cuda.get(), 80, 1e-3);
    }
  }
}

TEST_F(CudaSession, CodesOnTheDeviceAttendAsThoseOfTheHost) {
  // Logits within about 4 of each other: a row that one side reads exactly and the other by its code, as they lie side
  // by side in rank, then changes the output by less than the tolerance.
  host_config_.scale = cuda_config_.scale = 0.02F;
  EnginePtr host = make_engine(host_config_), cuda = make_engine(cuda_config_);
  keyhole_session_config c = small_session();
  c.index = "codes:k=4,v=4";
  c.flush_block = 256;
  c.append_block = 256;
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  c.budget.top_k = 16;
  c.budget.tail = KEYHOLE_TAIL_CODES;
  for (const keyhole_kv_host how : {KEYHOLE_KV_HOST_SAME, KEYHOLE_KV_HOST_INT8}) {
    SCOPED_TRACE(how);
    c.kv_host = how;
    c.offload_placement = KEYHOLE_PLACE_AUTO;
    SessionPtr a = make_session(host.get(), c);
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    SessionPtr b = make_session(cuda.get(), c);
    prefill(a.get(), 1500, 5);
    prefill(b.get(), 1500, 5, true);
    ASSERT_OK(keyhole_session_build(a.get(), nullptr, nullptr));
    ASSERT_EQ(layer_tokens(b.get(), 1).pending, 0U) << "nothing is left to build";
    compare(a.get(), b.get(), 300, 0.05);
    EXPECT_EQ(statistics(b.get()).index_bytes, 0U);
    ASSERT_OK(keyhole_session_truncate(a.get(), 1100));
    ASSERT_OK(keyhole_session_truncate(b.get(), 1100));
    b = fork_of(b.get());
    compare(a.get(), b.get(), 20, 0.05);

    // Tensors of the host take the same kernels.
    ASSERT_OK(keyhole_session_synchronize(b.get()));
    const Rows r = rows();
    std::vector<float> seen(q_size());
    const keyhole_tensor q = tensor(r.q, {hq(), d()}), o = tensor(seen, {hq(), d()});
    ASSERT_OK(keyhole_session_attend(b.get(), 1, &q, nullptr, nullptr, &o, nullptr));
    DeviceVector dq(q_size()), out(q_size());
    dq.set(r.q, stream_);
    const keyhole_tensor tq = dq.tensor({hq(), d()}), to = out.tensor({hq(), d()});
    ASSERT_OK(keyhole_session_attend(b.get(), 1, &tq, nullptr, nullptr, &to, nullptr));
    ASSERT_OK(keyhole_session_synchronize(b.get()));
    EXPECT_EQ(out.get(), seen);
  }
}

TEST_F(CudaSession, LearnedSinksAndLayersOfTheirOwnAgree) {
  std::vector<float> sinks(size_t{host_config_.layers} * host_config_.q_heads);
  for (size_t i = 0; i < sinks.size(); ++i) sinks[i] = static_cast<float>(i % 7) * 2.0F - 4.0F;
  sinks[1] = -INFINITY;
  std::vector<keyhole_layer_config> layers(host_config_.layers);
  for (keyhole_layer_config& l : layers) {
    keyhole_layer_config_init(&l, &host_config_);
    l.scale = &l == &layers[0] ? 0.02F : 0.03F;
    l.softcap = &l == &layers[0] ? 0.0F : 5.0F;
  }
  for (keyhole_engine_config* c : {&host_config_, &cuda_config_}) {
    c->sink_logits = sinks.data();
    c->layer_configs = layers.data();
    c->layer_count = c->layers;
  }
  EnginePtr a = make_engine(host_config_), b = make_engine(cuda_config_);
  for (const bool codes : {false, true}) {
    SCOPED_TRACE(codes ? "codes" : "flat");
    keyhole_session_config c = small_session();
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    if (codes) {
      c.index = "codes:k=4,v=4";
      c.flush_block = c.append_block = 256;
      c.budget.top_k = 16;
      c.budget.tail = KEYHOLE_TAIL_CODES;
    }
    SessionPtr host = make_session(a.get(), c);
    if (codes) c.offload_placement = KEYHOLE_PLACE_DEVICE;
    c.audit_share = 1.0;
    SessionPtr cuda = make_session(b.get(), c);
    for (keyhole_session* s : {host.get(), cuda.get()}) {
      prefill(s, 700, 3);
      ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
    }
    // A head in doubt reads more rows; sink and window are in what the device asks, not in what the host does.
    compare(host.get(), cuda.get(), 60, codes ? 0.15 : 1e-3);
    keyhole_audit audit;
    keyhole_audit_init(&audit);
    ASSERT_OK(keyhole_session_get_audit(cuda.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
    EXPECT_EQ(audit.audits, uint64_t{60} * 2 * host_config_.q_heads);
    EXPECT_LT(audit.error_max, codes ? 0.3 : 1e-2);
    EXPECT_GT(audit.mass_mean, 0.98);
  }
}

/// Logits of half a nat, of which codes can tell: in doubt the device reads more rows, the host does not for it.
constexpr float kSmallScale = 0.01F;

TEST_F(CudaSession, RowsThatTheHostReadsGiveTheSameBits) {
  cuda_config_.scale = kSmallScale;
  EnginePtr engine = make_engine(cuda_config_);
  keyhole_session_config c = small_session();
  c.index = "codes:k=2,v=2";
  c.flush_block = 256;
  c.budget.tail = KEYHOLE_TAIL_CODES;
  c.offload_placement = KEYHOLE_PLACE_DEVICE;
  DeviceVector q(q_size()), k(kv_size()), v(kv_size()), out(q_size());
  const keyhole_tensor tq = q.tensor({hq(), d()}), tk = k.tensor({hkv(), d()}),
                       tv = v.tensor({hkv(), d()}), to = out.tensor({hq(), d()});
  /// A step of every layer in each of the ways; what the layers answered.
  const auto answers = [&](keyhole_session* s, const Rows& r, int way, const CapturedGraph& graph) {
    std::vector<std::vector<float>> seen;
    for (uint32_t l = 0; l < host_config_.layers; ++l) {
      if (way == 2) {
        seen.push_back(attend_host(s, l, r, nullptr));
        continue;
      }
      q.set(r.q, stream_);
      k.set(r.k, stream_);
      v.set(r.v, stream_);
      if (way == 0) {
        EXPECT_OK(keyhole_session_attend(s, l, &tq, &tk, &tv, &to, nullptr));
      } else if (way == 1) {
        EXPECT_OK(keyhole_session_attend_begin(s, l, &tq, &tk, &tv));
        EXPECT_OK(keyhole_session_attend_end(s, &to, nullptr));
      } else if (l == 0) {
        EXPECT_OK(keyhole_session_announce(s));
        graph.launch();
      }
      EXPECT_OK(keyhole_session_synchronize(s));
      seen.push_back(out.get());
    }
    return seen;
  };
  for (const keyhole_kv_host how : {KEYHOLE_KV_HOST_SAME, KEYHOLE_KV_HOST_INT8}) {
    for (const uint32_t exact_rows : {3U, 16U, 64U}) {
      SCOPED_TRACE(std::to_string(how) + ", exact rows " + std::to_string(exact_rows));
      c.kv_host = how;
      c.budget.top_k = exact_rows;
      SessionPtr sessions[2];
      CapturedGraph graphs[2];
      for (int i = 0; i < 2; ++i) {
        c.exact_rows_by = i == 0 ? KEYHOLE_ROWS_BY_DEVICE : KEYHOLE_ROWS_BY_HOST;
        sessions[i] = make_session(engine.get(), c);
        ASSERT_OK(keyhole_session_set_stream(sessions[i].get(), stream_));
        prefill(sessions[i].get(), 1500, 5, true);
        ASSERT_OK(keyhole_session_synchronize(sessions[i].get()));
        EXPECT_EQ(statistics(sessions[i].get()).rows_by_host, static_cast<uint32_t>(i));
      }
      EXPECT_LT(statistics(sessions[1].get()).pinned_bytes + (1U << 20U),
                statistics(sessions[0].get()).pinned_bytes);
      const bool has_graphs = std::strcmp(statistics(sessions[1].get()).signal, "wait") == 0;
      for (int i = 0; i < 2 && has_graphs; ++i) {
        graphs[i] = CapturedGraph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
          for (uint32_t l = 0; l < host_config_.layers; ++l) {
            EXPECT_OK(keyhole_session_attend(sessions[i].get(), l, &tq, &tk, &tv, &to, nullptr));
          }
        });
      }
      for (int t = 0; t < 320; ++t) {
        const Rows r = rows();
        const int way = has_graphs ? t % 4 : t % 3;
        const auto a = answers(sessions[0].get(), r, way, graphs[0]);
        ASSERT_EQ(answers(sessions[1].get(), r, way, graphs[1]), a) << "token " << t;
      }
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(statistics(sessions[i].get()).codes_doubted, 0U);
        graphs[i] = CapturedGraph();
        ASSERT_OK(keyhole_session_truncate(sessions[i].get(), 900));
        sessions[i] = fork_of(sessions[i].get());
        ASSERT_OK(keyhole_session_set_stream(sessions[i].get(), stream_));
        EXPECT_EQ(statistics(sessions[i].get()).rows_by_host, static_cast<uint32_t>(i));
      }
      for (int t = 0; t < 6; ++t) {
        const Rows r = rows();
        const auto a = answers(sessions[0].get(), r, t % 3, graphs[0]);
        ASSERT_EQ(answers(sessions[1].get(), r, t % 3, graphs[1]), a) << "token " << t;
      }
    }
  }
}

TEST_F(CudaSession, PinningThatMayNotBeLeavesRowsToTheHost) {
  cuda_config_.scale = kSmallScale;
  EnginePtr engine = make_engine(cuda_config_);
  keyhole_session_config c = small_session();
  c.index = "codes:k=4,v=4";
  c.flush_block = 256;
  c.budget.top_k = 16;
  c.budget.tail = KEYHOLE_TAIL_CODES;
  SessionPtr free = make_session(engine.get(), c);
  c.pinned_memory_limit = statistics(free.get()).pinned_bytes + (1U << 20U);
  SessionPtr bound = make_session(engine.get(), c);
  for (keyhole_session* s : {free.get(), bound.get()}) prefill(s, 1500, 6);
  EXPECT_EQ(statistics(free.get()).rows_by_host, 0U);
  EXPECT_EQ(statistics(bound.get()).rows_by_host, 1U);
  EXPECT_EQ(statistics(bound.get()).code_layers, host_config_.layers);
  for (int t = 0; t < 20; ++t) {
    const Rows r = rows();
    for (uint32_t l = 0; l < host_config_.layers; ++l) {
      const auto a = attend_host(free.get(), l, r, nullptr);
      ASSERT_EQ(attend_host(bound.get(), l, r, nullptr), a);
    }
  }
  EXPECT_LE(statistics(bound.get()).pinned_bytes, c.pinned_memory_limit);
  EXPECT_GT(statistics(free.get()).pinned_bytes, c.pinned_memory_limit);
}

TEST_F(CudaSession, GraphsAreCapturedOnceAndLaunchedOften) {
  cuda_config_.signal = KEYHOLE_SIGNAL_WAIT;
  for (const bool partitions : {false, true}) {
    SCOPED_TRACE(partitions);
    EnginePtr a = make_engine(host_config_), b = make_engine(cuda_config_);
    keyhole_session_config c = small_session();
    SessionPtr host = make_session(a.get(), c);
    ASSERT_OK(keyhole_session_set_mode(host.get(), KEYHOLE_MODE_EXACT, 0));
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    if (partitions) {
      c.budget.attend = KEYHOLE_ATTEND_NONE;
      c.budget.tail = KEYHOLE_TAIL_CENTROID;
      c.tail_partition = 4;
      c.budget.min_keys = 4000;
    }
    SessionPtr cuda = make_session(b.get(), c);
    for (keyhole_session* s : {host.get(), cuda.get()}) prefill(s, 100, 7);
    ASSERT_OK(keyhole_session_build(cuda.get(), nullptr, nullptr));
    ASSERT_OK(keyhole_session_set_stream(cuda.get(), stream_));
    ASSERT_OK(keyhole_session_synchronize(cuda.get()));
    DeviceVector q(q_size()), k(kv_size()), v(kv_size()), out(q_size());
    const keyhole_tensor tq = q.tensor({hq(), d()}), tk = k.tensor({hkv(), d()}),
                         tv = v.tensor({hkv(), d()}), to = out.tensor({hq(), d()});
    CapturedGraph graph;
    // The first capture is thrown away. Within a capture calls answer or are refused, and do not end it.
    const auto token = [&] {
      for (uint32_t l = 0; l < 2; ++l) {
        EXPECT_OK(keyhole_session_attend(cuda.get(), l, &tq, &tk, &tv, &to, nullptr));
        EXPECT_EQ(layer_tokens(cuda.get(), l).total, 100U);
        EXPECT_EQ(statistics(cuda.get()).stream_steps, 0U);
        EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_synchronize(cuda.get()));
        EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_set_mode(cuda.get(), KEYHOLE_MODE_EXACT, 0));
        EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_truncate(cuda.get(), 10));
      }
    };
    for (int i = 0; i < 2; ++i) {
      graph = CapturedGraph(stream_, cudaStreamCaptureModeThreadLocal, token);
    }
    for (uint32_t t = 0; t < 90; ++t) {
      const Rows r = rows();
      q.set(r.q, stream_);
      k.set(r.k, stream_);
      v.set(r.v, stream_);
      ASSERT_OK(keyhole_session_announce(cuda.get()));
      graph.launch();
      ASSERT_OK(keyhole_session_synchronize(cuda.get()));
      (void)attend_host(host.get(), 0, r, nullptr);
      const auto expected = attend_host(host.get(), 1, r, nullptr);
      const auto seen = out.get();
      for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(seen[i], expected[i], 1e-3) << t;
    }
  }
}

TEST_F(CudaSession, TakesTensorsWhoseHeadsRunBackwards) {
  EnginePtr a = make_engine(host_config_), b = make_engine(cuda_config_);
  SessionPtr host = make_session(a.get(), small_session());
  SessionPtr cuda = make_session(b.get(), small_session());
  for (keyhole_session* s : {host.get(), cuda.get()}) prefill(s, 40, 7);
  ASSERT_OK(keyhole_session_set_stream(cuda.get(), stream_));
  const Rows r = rows();
  const auto reversed = [&](const std::vector<float>& rows) {
    std::vector<float> out;
    for (auto end = rows.end(); end != rows.begin(); end -= d()) {
      out.insert(out.end(), end - d(), end);
    }
    return out;
  };
  const auto backwards = [&](const DeviceVector& rows, int64_t heads) {
    keyhole_tensor t = rows.tensor({heads, d()});
    t.data = static_cast<float*>(t.data) + (heads - 1) * d();
    t.strides[0] = -d();
    return t;
  };
  DeviceVector q(q_size()), k(kv_size()), v(kv_size()), out(q_size());
  q.set(reversed(r.q), stream_);
  k.set(reversed(r.k), stream_);
  v.set(reversed(r.v), stream_);
  const keyhole_tensor tq = backwards(q, hq()), tk = backwards(k, hkv()), tv = backwards(v, hkv()),
                       to = backwards(out, hq());
  ASSERT_OK(keyhole_session_attend(cuda.get(), 0, &tq, &tk, &tv, &to, nullptr));
  ASSERT_OK(keyhole_session_synchronize(cuda.get()));
  const auto expected = reversed(attend_host(host.get(), 0, r, nullptr));
  const auto seen = out.get();
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(seen[i], expected[i], 1e-3) << i;
}

// Beside the same calls with tensors in host memory; q comes when the stream comes to it, out has gaps between its
// heads.
TEST_F(CudaSession, StatesOfOffloadedTokensInDeviceMemory) {
  const EnginePtr engine = make_engine(cuda_config_);
  const SessionPtr s = make_session(engine.get(), small_session());
  ASSERT_OK(keyhole_session_set_stream(s.get(), stream_));
  prefill(s.get(), 300, 5);
  const int64_t apart = d() + 8;
  const auto heads = static_cast<size_t>(hq()), width = static_cast<size_t>(d());
  DeviceVector q(q_size()), lse(heads), out(heads * static_cast<size_t>(apart));
  const std::vector<uint32_t> ids = {3, 250, 9, 77, 80}, counts = {2, 3};
  for (int i = 0; i < 6; ++i) {
    const std::vector<float> queries = numbers_.many(q_size());
    std::vector<float> host_o(q_size()), host_lse(heads);
    const keyhole_tensor host_q = tensor(queries, {hq(), d()}),
                         host_out = tensor(host_o, {hq(), d()});
    q.set(std::vector<float>(q_size(), 0.0F), stream_);
    out.set(std::vector<float>(heads * static_cast<size_t>(apart), 77.0F), stream_);
    const keyhole_tensor tq = q.tensor({hq(), d()});
    keyhole_tensor to = out.tensor({hq(), d()});
    to.strides[0] = apart;
    auto* const sums = static_cast<float*>(lse.tensor({hq()}).data);
    ASSERT_CUDA(cudaMemcpyAsync(tq.data, queries.data(), q_size() * sizeof(float),
                                cudaMemcpyHostToDevice, stream_));
    if (i % 2 == 0) {
      ASSERT_OK(keyhole_session_attend_offloaded(s.get(), 1, &tq, &to, sums));
      ASSERT_OK(keyhole_session_attend_offloaded(s.get(), 1, &host_q, &host_out, host_lse.data()));
    } else {
      ASSERT_OK(
          keyhole_session_attend_tokens(s.get(), 1, &tq, ids.data(), counts.data(), 1, &to, sums));
      ASSERT_OK(keyhole_session_attend_tokens(s.get(), 1, &host_q, ids.data(), counts.data(), 1,
                                              &host_out, host_lse.data()));
    }
    EXPECT_EQ(lse.get(), host_lse);
    const std::vector<float> seen = out.get();
    for (size_t h = 0; h < heads; ++h) {
      for (size_t j = 0; j < static_cast<size_t>(apart); ++j) {
        ASSERT_EQ(seen[h * static_cast<size_t>(apart) + j],
                  j < width ? host_o[h * width + j] : 77.0F)
            << "head " << h;
      }
    }
  }
}

TEST_F(CudaSession, FaultsHaveAStatusAndATextAndAnEnd) {
  EnginePtr engine = make_engine(cuda_config_);
  keyhole_session_config c = small_session();
  c.device_memory_limit = 4096;
  keyhole_session* none = nullptr;
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, keyhole_session_create(engine.get(), &c, &none));
  expect_error_text("4096");
  c.device_memory_limit = 0;
  c.max_tokens = 1U << 30;
  c.window = 1U << 28;  // 2 layers x 2 heads x 128 x 2 x 2 bytes x 2^28: 512 GiB
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, keyhole_session_create(engine.get(), &c, &none));
  EXPECT_EQ(none, nullptr);

  cuda_config_.timeout_ms = 100;
  engine = make_engine(cuda_config_);
  c = small_session();
  SessionPtr s = make_session(engine.get(), c);
  ASSERT_OK(keyhole_session_set_stream(s.get(), stream_));
  DeviceVector q(q_size()), k(kv_size()), v(kv_size()), out(q_size());
  const Rows r = rows();
  q.set(r.q, stream_);
  v.set(r.v, stream_);
  std::vector<float> bad = r.k;
  bad[5] = NAN;
  k.set(bad, stream_);
  const keyhole_tensor tq = q.tensor({hq(), d()}), tk = k.tensor({hkv(), d()}),
                       tv = v.tensor({hkv(), d()}), to = out.tensor({hq(), d()});
  EXPECT_OK(keyhole_session_attend(s.get(), 0, &tq, &tk, &tv, &to, nullptr));
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
  k.set(r.k, stream_);
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_attend(s.get(), 0, &tq, &tk, &tv, &to, nullptr));

  // A graph that is announced and never launched.
  s = make_session(engine.get(), c);
  ASSERT_OK(keyhole_session_set_stream(s.get(), stream_));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  (void)CapturedGraph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    EXPECT_OK(keyhole_session_attend(s.get(), 0, &tq, &tk, &tv, &to, nullptr));
  });
  ASSERT_OK(keyhole_session_announce(s.get()));
  EXPECT_EQ(KEYHOLE_TIMEOUT, keyhole_session_synchronize(s.get()));

  // Destroyed with steps under way.
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 5; ++i) {
    s = make_session(engine.get(), c);
    ASSERT_OK(keyhole_session_set_stream(s.get(), stream_));
    for (uint32_t l = 0; l < 2; ++l) {
      ASSERT_OK(keyhole_session_attend(s.get(), l, &tq, &tk, &tv, &to, nullptr));
    }
    s.reset();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace keyhole::test
