// Sessions on the machine's CUDA device whose steps choose among lists of codes, beside exact attention on the host: prompts,
// appends, truncation, copies, files, graphs.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "keyhole/inspect.h"
#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/captured_graph.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class CudaLists : public testing::Test {
 protected:
  static constexpr uint32_t kPrompt = 33400;

  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    if (gpu::kernels_major(0) < 9) GTEST_SKIP() << "no clusters";
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    config_ = small_engine(8);
    config_.layers = 1;
    config_.head_dim = 64;
    config_.q_heads = 8;
    config_.scale =
        0.012F;  // logits of rows lie half a nat about those of their centres, and these one nat apart
    host_ = make_engine(config_);
    config_.device = KEYHOLE_DEVICE_CUDA;
    config_.timeout_ms = 5000;
    engine_ = make_engine(config_);
    keyhole_session_config c = small_session();
    c.max_tokens = 44000;
    c.flush_block = c.append_block = 256;
    c.index = "exact";
    exact_ = make_session(host_.get(), c);
    c.budget.top_k = 16;
    c.budget.tail = KEYHOLE_TAIL_CODES;
    c.offload_placement = KEYHOLE_PLACE_DEVICE;
    c.index = "codes:k=4,v=4,lists=64,miss=0,from=32768";
    lists_ = make_session(engine_.get(), c);
    c.index = "codes:k=4,v=4";
    codes_ = make_session(engine_.get(), c);
  }
  void TearDown() override {
    exact_.reset(), lists_.reset(), codes_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] int64_t hq() const { return config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return config_.head_dim; }

  /// Appends n tokens in clusters to the sessions.
  void append(std::vector<keyhole_session*> sessions, uint32_t n) {
    const auto size = static_cast<size_t>(hkv() * d());
    std::vector<float> k = numbers_.many(n * size), v = numbers_.many(n * size),
                       q = numbers_.many(n * static_cast<size_t>(hq() * d()));
    if (centres_.empty()) centres_ = numbers_.many(64 * size);
    for (uint32_t i = 0; i < n; ++i) {
      const size_t c = numbers_.below(64);
      for (size_t j = 0; j < size; ++j) {
        k[i * size + j] += 2.0F * centres_[c * size + j];
        v[i * size + j] += centres_[c * size + j];
      }
    }
    const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()}),
                         tq = tensor(q, {n, hq(), d()});
    for (keyhole_session* s : sessions) ASSERT_OK(keyhole_session_append(s, 0, &tk, &tv, &tq));
  }
  struct Answer {
    std::vector<float> o, lse;
  };
  /// Steps without a token of their own.
  Answer on_host(keyhole_session* s, const std::vector<float>& q) {
    Answer a{std::vector<float>(q.size()), std::vector<float>(static_cast<size_t>(hq()))};
    const keyhole_tensor tq = tensor(q, {hq(), d()}), to = tensor(a.o, {hq(), d()});
    EXPECT_OK(keyhole_session_attend(s, 0, &tq, nullptr, nullptr, &to, a.lse.data()));
    return a;
  }
  Answer on_device(keyhole_session* s, const std::vector<float>& q) {
    EXPECT_OK(keyhole_session_set_stream(s, stream_));
    DeviceVector dq(q.size()), out(q.size()), lse(static_cast<size_t>(hq()));
    dq.set(q, stream_);
    const keyhole_tensor tq = dq.tensor({hq(), d()}), to = out.tensor({hq(), d()}),
                         tl = lse.tensor({hq()});
    EXPECT_OK(
        keyhole_session_attend(s, 0, &tq, nullptr, nullptr, &to, static_cast<float*>(tl.data)));
    EXPECT_OK(keyhole_session_synchronize(s));
    return {out.get(), lse.get()};
  }
  /// The relative error of all heads together.
  static double error(const Answer& seen, const Answer& right) {
    double difference = 0.0, norm = 1e-30;
    for (size_t i = 0; i < right.o.size(); ++i) {
      difference += std::pow(seen.o[i] - right.o[i], 2.0);
      norm += std::pow(right.o[i], 2.0);
    }
    return std::sqrt(difference / norm);
  }
  void expect_near(keyhole_session* s, keyhole_session* exact) {
    for (uint32_t i = 0; i < 3; ++i) {
      const std::vector<float> q = numbers_.many(static_cast<size_t>(hq() * d()));
      const Answer right = on_host(exact, q), seen = on_device(s, q);
      EXPECT_LT(error(seen, right), 0.05);
      for (size_t h = 0; h < right.lse.size(); ++h) EXPECT_NEAR(seen.lse[h], right.lse[h], 0.02);
    }
    // For a query of zeros all tokens weigh the same, by code, by mean or exactly: the log-sum-exp counts them.
    const std::vector<float> zeros(static_cast<size_t>(hq() * d()));
    const Answer right = on_host(exact, zeros), seen = on_device(s, zeros);
    for (size_t h = 0; h < right.lse.size(); ++h) EXPECT_NEAR(seen.lse[h], right.lse[h], 5e-4);
  }
  [[nodiscard]] uint64_t code_bytes() const {
    keyhole_memory_use use;
    keyhole_memory_use_init(&use);
    EXPECT_OK(keyhole_engine_get_memory(engine_.get(), &use));
    return use.code_bytes;
  }

  cudaStream_t stream_ = nullptr;
  keyhole_engine_config config_;
  EnginePtr host_, engine_;
  SessionPtr exact_, lists_, codes_;
  Numbers numbers_{29};
  std::vector<float> centres_;
};

TEST_F(CudaLists, FollowASession) {
  append({exact_.get(), lists_.get(), codes_.get()}, kPrompt);
  expect_near(lists_.get(), exact_.get());
  // Once lists are made it chooses: its answers are not those of all codes.
  const std::vector<float> q = numbers_.many(static_cast<size_t>(hq() * d()));
  const Answer by_codes = on_device(codes_.get(), q);
  double apart = 0.0;
  for (uint32_t i = 0; i < 1000 && apart < 1e-5; ++i) {
    apart = error(on_device(lists_.get(), q), by_codes);
  }
  EXPECT_GT(apart, 1e-5);
  const uint64_t all = code_bytes();
  codes_.reset();
  EXPECT_GT(code_bytes(), (all - code_bytes()) * 3 / 2);

  append({exact_.get(), lists_.get()}, 5000);
  expect_near(lists_.get(), exact_.get());
  SessionPtr copy = fork_of(lists_.get());
  expect_near(copy.get(), exact_.get());
  for (keyhole_session* s : {exact_.get(), lists_.get()}) {
    ASSERT_OK(keyhole_session_truncate(s, 34000));
  }
  expect_near(lists_.get(), exact_.get());
  append({exact_.get(), lists_.get()}, 4500);
  expect_near(lists_.get(), exact_.get());

  const TemporaryFolder folder;
  const std::string path = (folder / "session").string();
  ASSERT_OK(keyhole_session_save(lists_.get(), path.c_str()));
  copy.reset();
  SessionPtr loaded = load_of(engine_.get(), path);
  expect_near(loaded.get(), exact_.get());
  for (keyhole_session* s : {exact_.get(), loaded.get()}) {
    ASSERT_OK(keyhole_session_truncate(s, 1000));
  }
  expect_near(loaded.get(), exact_.get());
}

TEST_F(CudaLists, StayInAGraph) {
  append({exact_.get(), lists_.get()}, kPrompt);
  keyhole_session* const s = lists_.get();
  ASSERT_OK(keyhole_session_set_stream(s, stream_));
  ASSERT_OK(keyhole_session_synchronize(s));
  const auto kv = static_cast<size_t>(hkv() * d());
  DeviceVector q(static_cast<size_t>(hq() * d())), k(kv), v(kv),
      out(static_cast<size_t>(hq() * d()));
  const keyhole_tensor tq = q.tensor({hq(), d()}), tk = k.tensor({hkv(), d()}),
                       tv = v.tensor({hkv(), d()}), to = out.tensor({hq(), d()});
  (void)on_device(s, numbers_.many(static_cast<size_t>(hq() * d())));
  const CapturedGraph graph(stream_, cudaStreamCaptureModeThreadLocal, [&] {
    ASSERT_OK(keyhole_session_attend(s, 0, &tq, &tk, &tv, &to, nullptr));
  });
  for (uint32_t t = 0; t < 600; ++t) {
    const std::vector<float> nq = numbers_.many(static_cast<size_t>(hq() * d())),
                             nk = numbers_.many(kv), nv = numbers_.many(kv);
    q.set(nq, stream_);
    k.set(nk, stream_);
    v.set(nv, stream_);
    ASSERT_OK(keyhole_session_announce(s));
    graph.launch();
    const keyhole_tensor hk = tensor(nk, {1, hkv(), d()}), hv = tensor(nv, {1, hkv(), d()});
    ASSERT_OK(keyhole_session_append(exact_.get(), 0, &hk, &hv, nullptr));
    if (t % 150 != 149) continue;
    ASSERT_OK(keyhole_session_synchronize(s));
    Answer seen{out.get(), {}};
    EXPECT_LT(error(seen, on_host(exact_.get(), nq)), 0.05) << "token " << t;
  }
}

}  // namespace
}  // namespace keyhole::test
