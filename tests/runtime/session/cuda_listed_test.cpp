// Many new tokens by patterns of prompts in sessions on the machine's CUDA device, beside sessions on the host that
// attend by the same patterns: rows that are pinned, such that are not, and int8.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "keyhole/batch.h"
#include "keyhole/stream.h"
#include "tests/runtime/device_vector.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

struct Blocks {
  uint64_t attended = 0, seen = 0;
  [[nodiscard]] double share() const {
    return static_cast<double>(attended) / static_cast<double>(seen);
  }
};
Blocks blocks_of(const keyhole_session* s) {
  Blocks b;
  EXPECT_OK(keyhole_session_get_extend_blocks(s, &b.attended, &b.seen));
  return b;
}

class CudaListed : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu::cuda_devices().empty()) GTEST_SKIP() << gpu::cuda_status();
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    config_ = small_engine(4);
    config_.head_dim = 128;
    config_.q_heads = 8;
    config_.scale = 0.02F;  // logits within about 4 of each other
    host_ = make_engine(config_);
    config_.device = KEYHOLE_DEVICE_CUDA;
    config_.timeout_ms = 5000;
    cuda_ = make_engine(config_);
  }
  void TearDown() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] int64_t hq() const { return config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return config_.head_dim; }
  std::vector<float> many(int64_t n) { return numbers_.many(static_cast<size_t>(n)); }

  void prefill(keyhole_session* a, keyhole_session* b, uint32_t n) {
    for (uint32_t l = 0; l < config_.layers; ++l) {
      const auto k = many(n * hkv() * d()), v = many(n * hkv() * d());
      const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
      ASSERT_OK(keyhole_session_append(a, l, &tk, &tv, nullptr));
      ASSERT_OK(keyhole_session_append(b, l, &tk, &tv, nullptr));
    }
  }
  /// Makes the same turn in both sessions, and returns the largest difference of outputs and sums.
  double extend(keyhole_session* host, keyhole_session* cuda, uint32_t layer, uint32_t n) {
    const auto q = many(n * hq() * d()), k = many(n * hkv() * d()), v = many(n * hkv() * d());
    std::vector<float> o(q.size()), lse(static_cast<size_t>(n * hq()));
    const keyhole_tensor tq = tensor(q, {n, hq(), d()}), tk = tensor(k, {n, hkv(), d()}),
                         tv = tensor(v, {n, hkv(), d()}), to = tensor(o, {n, hq(), d()});
    EXPECT_OK(keyhole_session_extend(host, layer, &tq, &tk, &tv, nullptr, &to, lse.data()));
    DeviceVector dq(q.size()), dk(k.size()), dv(v.size()), dout(o.size()), dlse(lse.size());
    dq.set(q, stream_);
    dk.set(k, stream_);
    dv.set(v, stream_);
    const keyhole_tensor cq = dq.tensor({n, hq(), d()}), ck = dk.tensor({n, hkv(), d()}),
                         cv = dv.tensor({n, hkv(), d()}), co = dout.tensor({n, hq(), d()}),
                         cl = dlse.tensor({n, hq()});
    EXPECT_OK(keyhole_session_extend(cuda, layer, &cq, &ck, &cv, nullptr, &co,
                                     static_cast<float*>(cl.data)));
    EXPECT_OK(keyhole_session_synchronize(cuda));
    double worst = 0;
    const auto compare = [&](const std::vector<float>& a, const std::vector<float>& b) {
      for (size_t i = 0; i < a.size(); ++i) {
        const double x = std::abs(double{a[i]} - double{b[i]});
        if (!(x <= worst)) worst = x;
      }
    };
    compare(o, dout.get());
    compare(lse, dlse.get());
    return worst;
  }

  cudaStream_t stream_ = nullptr;
  keyhole_engine_config config_;
  EnginePtr host_, cuda_;
  Numbers numbers_{29};
};

TEST_F(CudaListed, AttendAsSessionsOnTheHost) {
  struct Way {
    bool coded;
    keyhole_kv_host how;
  };
  for (const Way way : {Way{true, KEYHOLE_KV_HOST_SAME}, Way{false, KEYHOLE_KV_HOST_SAME},
                        Way{true, KEYHOLE_KV_HOST_INT8}, Way{false, KEYHOLE_KV_HOST_INT8}}) {
    SCOPED_TRACE(std::string(way.coded ? "codes" : "flat") +
                 (way.how == KEYHOLE_KV_HOST_INT8 ? ", int8" : ""));
    keyhole_session_config c = small_session();
    c.sink = 70;
    c.flush_block = 256;
    c.append_block = 256;
    c.kv_host = way.how;
    const SessionPtr host = make_session(host_.get(), c);
    if (way.coded) {
      c.index = "codes:k=4,v=4";
      c.append_mode = KEYHOLE_APPEND_IN_STEP;
      c.budget.top_k = 16;
      c.budget.tail = KEYHOLE_TAIL_CODES;
      c.offload_placement = KEYHOLE_PLACE_DEVICE;
    }
    const SessionPtr cuda = make_session(cuda_.get(), c);
    ASSERT_OK(keyhole_session_set_stream(cuda.get(), stream_));
    prefill(host.get(), cuda.get(), 1900);
    const auto set = [&](const char* pattern) {
      for (keyhole_session* s : {host.get(), cuda.get()})
        ASSERT_OK(keyhole_session_set_extend_pattern(s, pattern, 1));
    };
    // Windows are the device's own; what was offloaded as int8 may differ by some tokens.
    const double tolerance = way.how == KEYHOLE_KV_HOST_INT8 ? 0.05 : 0.01;
    for (const char* pattern :
         {"a-shape:first=128,near=192", "sampled:mass=1000,first=99999,from=0",
          "vertical-slash:columns=0,slashes=9,first=99999,from=0", "dense"}) {
      SCOPED_TRACE(pattern);
      set(pattern);
      for (const uint32_t n : {200U, 1U, 129U})
        EXPECT_LE(extend(host.get(), cuda.get(), 1, n), tolerance) << n;
      EXPECT_EQ(blocks_of(cuda.get()).attended, blocks_of(host.get()).attended);
      EXPECT_EQ(blocks_of(cuda.get()).seen, blocks_of(host.get()).seen);
    }
    set("sampled:mass=600,lookups=1000,first=64,near=64,from=0");
    (void)extend(host.get(), cuda.get(), 0, 300);
    const Blocks a = blocks_of(host.get()), b = blocks_of(cuda.get());
    EXPECT_EQ(a.seen, b.seen);
    EXPECT_NEAR(a.share(), b.share(), 0.01);
    EXPECT_LT(b.attended, b.seen);
    // What comes next attends all tokens.
    set(nullptr);
    ASSERT_OK(keyhole_session_set_mode(host.get(), KEYHOLE_MODE_EXACT, 0));
    ASSERT_OK(keyhole_session_set_mode(cuda.get(), KEYHOLE_MODE_EXACT, 0));
    EXPECT_LE(extend(host.get(), cuda.get(), 0, 150), tolerance);
    EXPECT_EQ(layer_tokens(host.get(), 1).total, layer_tokens(cuda.get(), 1).total);
  }
}

// Without memory for lists a turn is exact; without memory for all rows at once, too.
TEST_F(CudaListed, WithoutDeviceMemoryTurnsAreExact) {
  keyhole_session_config c = small_session();
  const SessionPtr host = make_session(host_.get(), c);
  const SessionPtr free = make_session(cuda_.get(), c);
  c.device_memory_limit = statistics(free.get()).device_bytes + 4096;
  const SessionPtr cuda = make_session(cuda_.get(), c);
  ASSERT_OK(keyhole_session_set_stream(cuda.get(), stream_));
  prefill(host.get(), cuda.get(), 700);
  ASSERT_OK(keyhole_session_set_extend_pattern(host.get(), "dense", 1));
  ASSERT_OK(keyhole_session_set_extend_pattern(cuda.get(), "a-shape:first=64,near=64", 1));
  EXPECT_LE(extend(host.get(), cuda.get(), 0, 150), 0.01);
  EXPECT_EQ(blocks_of(cuda.get()).seen, 0U);
}

}  // namespace
}  // namespace keyhole::test
