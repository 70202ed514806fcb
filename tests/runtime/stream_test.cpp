// Steps in the order of a stream, against the same steps with tensors in host memory and against the definition.
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/api_objects.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/stream_device.h"

namespace keyhole::test {
namespace {

/// An engine whose device has streams.
struct StreamEngine {
  explicit StreamEngine(keyhole_engine_config c, uint32_t timeout_ms = 2000) {
    c.timeout_ms = timeout_ms;
    faults.timeout_ms = timeout_ms;
    const cpu::Kernels& kernels = cpu::select_kernels(nullptr);
    runtime::StreamDevice device;
    device.name = "test device";
    device.make_resident = [this, &kernels](const gpu::ResidentShape& shape, size_t limit) {
      if (limit != 0 && gpu::cuda_resident_bytes(shape) > limit) {
        throw Error(Status::out_of_device_memory, "planted: no room");
      }
      return std::make_unique<FakeDevice>(shape, kernels, stream, faults);
    };
    device.make_partitions = [](gpu::Resident&, const gpu::PartitionsShape& shape) {
      return std::make_unique<FakePartitions>(shape);
    };
    handle = std::make_unique<keyhole_engine>();
    handle->engine = std::make_shared<const runtime::Engine>(c, std::move(device));
  }
  FakeStream stream;
  FakeFaults faults;
  std::unique_ptr<keyhole_engine> handle;
};

keyhole_tensor on_device(const std::vector<float>& v, std::initializer_list<int64_t> shape) {
  keyhole_tensor t = tensor(v, shape);
  t.memory = KEYHOLE_DEVICE;
  return t;
}

struct Token {
  std::vector<float> q, k, v;
};

class StreamSteps : public testing::Test {
 protected:
  Token token() {
    return {numbers_.many(size_t{engine_config_.q_heads} * engine_config_.head_dim),
            numbers_.many(size_t{engine_config_.kv_heads} * engine_config_.head_dim),
            numbers_.many(size_t{engine_config_.kv_heads} * engine_config_.head_dim)};
  }
  [[nodiscard]] int64_t hq() const { return engine_config_.q_heads; }
  [[nodiscard]] int64_t hkv() const { return engine_config_.kv_heads; }
  [[nodiscard]] int64_t d() const { return engine_config_.head_dim; }

  void prefill(keyhole_session* s, uint32_t n, uint64_t seed) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      Numbers numbers(seed + l);
      const auto k = numbers.many(size_t{n} * engine_config_.kv_heads * engine_config_.head_dim);
      const auto v = numbers.many(k.size());
      const auto q = numbers.many(size_t{n} * engine_config_.q_heads * engine_config_.head_dim);
      const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
      const keyhole_tensor tq = tensor(q, {n, hq(), d()});
      ASSERT_OK(keyhole_prefill(s, l, &tk, &tv, &tq));
    }
  }
  std::vector<float> attend_host(keyhole_session* s, uint32_t layer, const Token& t, float* lse) {
    std::vector<float> out(t.q.size());
    const keyhole_tensor q = tensor(t.q, {hq(), d()}), k = tensor(t.k, {hkv(), d()}),
                         v = tensor(t.v, {hkv(), d()}), o = tensor(out, {hq(), d()});
    EXPECT_OK(keyhole_attend(s, layer, &q, &k, &v, &o, lse));
    return out;
  }
  keyhole_status enqueue(keyhole_session* s, uint32_t layer, const Token& t,
                         std::vector<float>& out, float* lse, bool halves = false) {
    const keyhole_tensor q = on_device(t.q, {hq(), d()}), k = on_device(t.k, {hkv(), d()}),
                         v = on_device(t.v, {hkv(), d()}), o = on_device(out, {hq(), d()});
    if (!halves) return keyhole_attend(s, layer, &q, &k, &v, &o, lse);
    const keyhole_status status = keyhole_attend_begin(s, layer, &q, &k, &v);
    return status != KEYHOLE_OK ? status : keyhole_attend_end(s, &o, lse);
  }

  /// Decodes the same tokens in both sessions; outputs agree.
  void compare(keyhole_session* host, keyhole_session* stream, uint32_t tokens, double tolerance) {
    const uint32_t layers = engine_config_.layers;
    for (uint32_t t = 0; t < tokens; ++t) {
      std::vector<Token> rows;
      std::vector<std::vector<float>> out(layers), lse(layers);
      for (uint32_t l = 0; l < layers; ++l) {
        rows.push_back(token());
        out[l].assign(rows[l].q.size(), NAN);
        lse[l].assign(engine_config_.q_heads, NAN);
      }
      // The whole token is enqueued before anybody waits.
      for (uint32_t l = 0; l < layers; ++l) {
        ASSERT_OK(enqueue(stream, l, rows[l], out[l], lse[l].data(), t % 2 == 1));
      }
      ASSERT_OK(keyhole_session_synchronize(stream));
      for (uint32_t l = 0; l < layers; ++l) {
        std::vector<float> host_lse(engine_config_.q_heads);
        const auto truth = attend_host(host, l, rows[l], host_lse.data());
        for (size_t i = 0; i < truth.size(); ++i) {
          ASSERT_NEAR(out[l][i], truth[i], tolerance) << "token " << t << ", layer " << l;
        }
        for (uint32_t h = 0; h < engine_config_.q_heads; ++h) {
          ASSERT_NEAR(lse[l][h], host_lse[h], tolerance) << "token " << t << ", layer " << l;
        }
        keyhole_layer_tokens a, b;
        keyhole_layer_tokens_init(&a);
        keyhole_layer_tokens_init(&b);
        ASSERT_OK(keyhole_get_layer_tokens(host, l, &a));
        ASSERT_OK(keyhole_get_layer_tokens(stream, l, &b));
        ASSERT_EQ(0, std::memcmp(&a, &b, sizeof a)) << "token " << t << ", layer " << l;
      }
    }
  }

  keyhole_engine_config engine_config_ = small_engine(3);
  Numbers numbers_{17};
};

TEST_F(StreamSteps, AgreeWithStepsInHostMemory) {
  for (const char* index : {"flat", "ivf:C=8,probe=4", "roargraph:M=8,ef=64"}) {
    SCOPED_TRACE(index);
    StreamEngine device(engine_config_);
    EnginePtr host_engine = make_engine(engine_config_);
    keyhole_session_config c = small_session();
    c.index = index;
    c.budget.top_k = 12;
    c.append_mode = KEYHOLE_APPEND_IN_STEP;
    SessionPtr host = make_session(host_engine.get(), c);
    SessionPtr stream = make_session(device.handle.get(), c);
    for (keyhole_session* s : {host.get(), stream.get()}) {
      prefill(s, 150, 5);
      ASSERT_OK(keyhole_build(s, nullptr, nullptr));
    }
    // Through several overflows of the window and blocks that go into the index.
    compare(host.get(), stream.get(), 120, 1e-5);
    keyhole_statistics s;
    keyhole_statistics_init(&s);
    ASSERT_OK(keyhole_get_statistics(stream.get(), &s));
    EXPECT_EQ(s.stream_steps, 240U);
    EXPECT_EQ(s.attends, 240U);
    EXPECT_GE(s.append_blocks, 2U);
    EXPECT_STREQ(s.signal, "wait");
    EXPECT_STREQ(s.device, "test device");
    EXPECT_GE(s.host_bytes_peak, s.index_bytes);
  }
}

TEST_F(StreamSteps, BeginWithAnEmptySession) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  SessionPtr stream = make_session(device.handle.get(), small_session());
  compare(host.get(), stream.get(), 60, 1e-5);
}

TEST_F(StreamSteps, TakeTurnsWithCallsInHostMemory) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  SessionPtr stream = make_session(device.handle.get(), small_session());
  for (uint32_t round = 0; round < 3; ++round) {
    for (keyhole_session* s : {host.get(), stream.get()}) {
      prefill(s, 40, 90 + round);
      ASSERT_OK(keyhole_build(s, nullptr, nullptr));
    }
    compare(host.get(), stream.get(), 7, 1e-5);
    const Token t = token();
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      EXPECT_EQ(attend_host(host.get(), l, t, nullptr), attend_host(stream.get(), l, t, nullptr));
    }
    for (keyhole_session* s : {host.get(), stream.get()}) {
      ASSERT_OK(keyhole_truncate(s, 30 * (round + 1)));
    }
    compare(host.get(), stream.get(), 5, 1e-5);
    keyhole_session* copy = nullptr;
    ASSERT_OK(keyhole_fork(stream.get(), &copy));
    stream.reset(copy);
    compare(host.get(), stream.get(), 5, 1e-5);
  }
}

TEST_F(StreamSteps, OfACapturedGraphComeWithEachLaunch) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  SessionPtr host = make_session(host_engine.get(), c);
  SessionPtr stream = make_session(device.handle.get(), c);
  for (keyhole_session* s : {host.get(), stream.get()}) {
    prefill(s, 90, 3);
    ASSERT_OK(keyhole_build(s, nullptr, nullptr));
  }
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce(stream.get()));
  ASSERT_OK(keyhole_session_synchronize(stream.get()));

  Token t = token();
  std::vector<float> out(t.q.size());
  device.stream.capturing = true;
  for (uint32_t l = 0; l < 2; ++l) ASSERT_OK(enqueue(stream.get(), l, t, out, nullptr));
  device.stream.capturing = false;
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  ASSERT_OK(keyhole_get_layer_tokens(stream.get(), 0, &tokens));
  EXPECT_EQ(tokens.total, 90U) << "a captured step has not happened";

  for (uint32_t i = 0; i < 80; ++i) {
    const Token next = token();
    std::copy(next.q.begin(), next.q.end(), t.q.begin());  // the graph reads the same memory
    std::copy(next.k.begin(), next.k.end(), t.k.begin());
    std::copy(next.v.begin(), next.v.end(), t.v.begin());
    std::fill(out.begin(), out.end(), NAN);
    ASSERT_OK(keyhole_session_announce(stream.get()));
    device.stream.launch_graph();
    ASSERT_OK(keyhole_session_synchronize(stream.get()));
    (void)attend_host(host.get(), 0, next, nullptr);
    const auto truth = attend_host(host.get(), 1, next, nullptr);
    for (size_t j = 0; j < truth.size(); ++j) ASSERT_NEAR(out[j], truth[j], 1e-5) << i;
  }
  // A second capture replaces the first, without a plain step in between.
  device.stream.capturing = true;
  device.stream.graph.clear();
  for (uint32_t l = 0; l < 2; ++l) ASSERT_OK(enqueue(stream.get(), l, t, out, nullptr));
  device.stream.capturing = false;
  ASSERT_OK(keyhole_session_announce(stream.get()));
  device.stream.launch_graph();
  ASSERT_OK(keyhole_session_synchronize(stream.get()));
  ASSERT_OK(keyhole_get_layer_tokens(stream.get(), 0, &tokens));
  EXPECT_EQ(tokens.total, 171U);

  ASSERT_OK(keyhole_session_set_mode(stream.get(), KEYHOLE_MODE_EXACT, 0));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce(stream.get()));
  EXPECT_NE(std::string(keyhole_last_error()).find("captur"), std::string::npos);
}

TEST_F(StreamSteps, ReadThePartitionsThatTheDeviceHasChosen) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  c.budget.min_keys = 4096;  // all of them: then nothing is left to estimates
  SessionPtr host = make_session(host_engine.get(), c);
  c.partitions = KEYHOLE_PLACE_DEVICE;
  SessionPtr stream = make_session(device.handle.get(), c);
  for (keyhole_session* s : {host.get(), stream.get()}) {
    prefill(s, 300, 8);
    ASSERT_OK(keyhole_build(s, nullptr, nullptr));
  }
  compare(host.get(), stream.get(), 150, 1e-5);
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  ASSERT_OK(keyhole_get_statistics(stream.get(), &s));
  EXPECT_GT(s.partition_bytes, 0U);
  EXPECT_GT(s.keys_opened, 0U);
  EXPECT_GE(s.append_blocks, 2U);
}

TEST_F(StreamSteps, EveryKeyCountsOnceWhateverIsChosen) {
  // Keys of a partition that are all alike: their mean stands for them exactly, so any choice gives the truth.
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  SessionPtr exact = make_session(host_engine.get(), c);
  ASSERT_OK(keyhole_session_set_mode(exact.get(), KEYHOLE_MODE_EXACT, 0));
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.budget.min_keys = 8;
  c.partitions = KEYHOLE_PLACE_DEVICE;
  SessionPtr stream = make_session(device.handle.get(), c);
  const uint32_t n = 400;
  for (uint32_t l = 0; l < engine_config_.layers; ++l) {
    Numbers numbers(40 + l);
    const size_t row = size_t{engine_config_.kv_heads} * engine_config_.head_dim;
    std::vector<float> k, v;
    std::vector<std::vector<float>> kinds;
    for (int i = 0; i < 6; ++i) kinds.push_back(numbers.many(2 * row));
    for (uint32_t t = 0; t < n; ++t) {
      const auto& kind = kinds[numbers.below(6)];
      k.insert(k.end(), kind.begin(), kind.begin() + static_cast<ptrdiff_t>(row));
      v.insert(v.end(), kind.begin() + static_cast<ptrdiff_t>(row), kind.end());
    }
    const keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()});
    for (keyhole_session* s : {exact.get(), stream.get()}) {
      ASSERT_OK(keyhole_prefill(s, l, &tk, &tv, nullptr));
    }
  }
  ASSERT_OK(keyhole_build(stream.get(), nullptr, nullptr));
  for (uint32_t t = 0; t < 20; ++t) {
    Token next = token();
    for (float& x : next.q) x *= 0.25F;  // int8 codes of mean keys: an error of 1e-2 in a logit
    std::vector<float> out(next.q.size(), NAN);
    ASSERT_OK(enqueue(stream.get(), 0, next, out, nullptr));
    ASSERT_OK(keyhole_session_synchronize(stream.get()));
    const auto truth = attend_host(exact.get(), 0, next, nullptr);
    for (size_t i = 0; i < truth.size(); ++i) ASSERT_NEAR(out[i], truth[i], 0.05) << t;
  }
  keyhole_statistics s;
  keyhole_statistics_init(&s);
  ASSERT_OK(keyhole_get_statistics(stream.get(), &s));
  EXPECT_LT(s.keys_attended, s.keys_offered);
}

TEST_F(StreamSteps, PartitionsThatDoNotFitTheDevice) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = small_session();
  c.budget.attend = KEYHOLE_ATTEND_NONE;
  c.budget.tail = KEYHOLE_TAIL_CENTROID;
  c.tail_partition = 4;
  c.budget.min_keys = 16;
  c.device_memory_limit = gpu::cuda_resident_bytes({2, 4, 2, 64, DType::f16, 4, 24, 16, {}}) + 1000;
  for (const keyhole_placement place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_DEVICE}) {
    c.partitions = place;
    SessionPtr s = make_session(device.handle.get(), c);
    prefill(s.get(), 200, 4);
    ASSERT_OK(keyhole_build(s.get(), nullptr, nullptr));
    const Token t = token();
    std::vector<float> out(t.q.size(), NAN);
    const keyhole_status status = enqueue(s.get(), 0, t, out, nullptr);
    if (place == KEYHOLE_PLACE_DEVICE) {
      EXPECT_EQ(status, KEYHOLE_OUT_OF_DEVICE_MEMORY);
      EXPECT_NE(std::string(keyhole_last_error()).find("device_memory_limit"), std::string::npos);
    } else {
      EXPECT_EQ(status, KEYHOLE_OK) << keyhole_last_error();
      ASSERT_OK(keyhole_session_synchronize(s.get()));
      EXPECT_TRUE(std::isfinite(out[0]));
    }
  }
  c.device_memory_limit = 1000;
  keyhole_session* none = nullptr;
  EXPECT_EQ(KEYHOLE_OUT_OF_DEVICE_MEMORY, keyhole_session_create(device.handle.get(), &c, &none));
  EXPECT_EQ(none, nullptr);
}

TEST_F(StreamSteps, ReportLateWhatIsNotFinite) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), small_session());
  Token t = token();
  std::vector<float> out(t.q.size());
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  t.k[70] = NAN;
  EXPECT_OK(enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_synchronize(s.get()));
  EXPECT_NE(std::string(keyhole_last_error()).find("tensor k holds NaN"), std::string::npos)
      << keyhole_last_error();
  t.k[70] = 1.0F;
  EXPECT_EQ(KEYHOLE_NOT_FINITE, enqueue(s.get(), 0, t, out, nullptr)) << "no more steps";
  // What all layers had completed is still there.
  keyhole_session* copy = nullptr;
  ASSERT_OK(keyhole_fork(s.get(), &copy));
  SessionPtr other(copy);
  EXPECT_OK(enqueue(other.get(), 0, t, out, nullptr));
  EXPECT_OK(keyhole_session_synchronize(other.get()));
}

TEST_F(StreamSteps, ThatNeverComeEndInATimeout) {
  StreamEngine device(engine_config_, 50);
  SessionPtr s = make_session(device.handle.get(), small_session());
  device.faults.loses_queries = true;
  const Token t = token();
  std::vector<float> out(t.q.size());
  EXPECT_OK(enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_OK(enqueue(s.get(), 1, t, out, nullptr));
  EXPECT_EQ(KEYHOLE_TIMEOUT, keyhole_session_synchronize(s.get()));
  EXPECT_NE(std::string(keyhole_last_error()).find("50 ms"), std::string::npos);
}

TEST_F(StreamSteps, OfAWorkerThatStallsEndInATimeoutOfTheDevice) {
  StreamEngine device(engine_config_, 50);
  SessionPtr s = make_session(device.handle.get(), small_session());
  const Token t = token();
  std::vector<float> out(t.q.size());
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  device.faults.stalls = true;
  EXPECT_OK(enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_EQ(KEYHOLE_TIMEOUT, keyhole_session_synchronize(s.get()));
  EXPECT_NE(std::string(keyhole_last_error()).find("did not answer"), std::string::npos);
  EXPECT_EQ(KEYHOLE_TIMEOUT, enqueue(s.get(), 0, t, out, nullptr)) << "no more steps";
}

TEST_F(StreamSteps, AnnouncedAndNeverLaunchedEndInATimeout) {
  StreamEngine device(engine_config_, 50);
  SessionPtr s = make_session(device.handle.get(), small_session());
  const Token t = token();
  std::vector<float> out(t.q.size());
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  device.stream.capturing = true;
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  device.stream.capturing = false;
  // The layer is empty, and the captured step will bring its first token.
  ASSERT_OK(keyhole_session_announce(s.get()));
  EXPECT_EQ(KEYHOLE_TIMEOUT, keyhole_session_synchronize(s.get()));
}

TEST_F(StreamSteps, FailWithTheDevice) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), small_session());
  const Token t = token();
  std::vector<float> out(t.q.size());
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  device.faults.fails = true;
  EXPECT_EQ(KEYHOLE_DEVICE_ERROR, enqueue(s.get(), 1, t, out, nullptr));
  EXPECT_EQ(KEYHOLE_DEVICE_ERROR, keyhole_session_synchronize(s.get()));
}

TEST_F(StreamSteps, SessionsCanBeDestroyedWithStepsUnderWay) {
  for (int i = 0; i < 20; ++i) {
    StreamEngine device(engine_config_, 20000);
    SessionPtr s = make_session(device.handle.get(), small_session());
    device.faults.loses_queries = i % 2 == 1;
    const Token t = token();
    std::vector<float> out(t.q.size());
    for (int step = 0; step < 4; ++step) {
      // The caller may be one token ahead of the host and no more: a lost query ends that.
      if (device.faults.loses_queries && step == 1) break;
      ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
      ASSERT_OK(enqueue(s.get(), 1, t, out, nullptr));
    }
    s.reset();  // within the test's time, not after 20 s
  }
}

TEST_F(StreamSteps, RefuseWhatDoesNotFit) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), small_session());
  const Token t = token();
  std::vector<float> out(t.q.size());
  const keyhole_tensor q = on_device(t.q, {hq(), d()}), k = tensor(t.k, {hkv(), d()}),
                       v = on_device(t.v, {hkv(), d()}), o = on_device(out, {hq(), d()});
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_attend(s.get(), 0, &q, &k, &v, &o, nullptr));
  const keyhole_tensor host_out = tensor(out, {hq(), d()});
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_attend(s.get(), 0, &q, nullptr, nullptr, &host_out, nullptr));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_attend(s.get(), 0, &q, nullptr, nullptr, &o, nullptr))
      << "no token to attend to";
  keyhole_tensor dk = k;
  dk.memory = KEYHOLE_DEVICE;
  ASSERT_OK(keyhole_attend_begin(s.get(), 0, &q, &dk, &v));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_attend_begin(s.get(), 1, &q, &dk, &v));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_truncate(s.get(), 0));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_attend_end(s.get(), &host_out, nullptr));
  ASSERT_OK(keyhole_attend_end(s.get(), &o, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));

  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_attend(host.get(), 0, &q, &dk, &v, &o, nullptr));
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_set_stream(host.get(), nullptr));
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_announce(host.get()));
  EXPECT_OK(keyhole_session_synchronize(host.get()));
}

}  // namespace
}  // namespace keyhole::test
