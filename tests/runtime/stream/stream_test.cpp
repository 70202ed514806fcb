// Steps in the order of a stream, against the same steps with tensors in host memory and against the definition.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/stream_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

class StreamSteps : public StreamTest {};

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
      ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
    }
    // Through several overflows of the window and blocks that go into the index.
    compare(host.get(), stream.get(), 120, 1e-5);
    keyhole_statistics s;
    keyhole_statistics_init(&s);
    ASSERT_OK(keyhole_session_get_statistics(stream.get(), &s));
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

TEST_F(StreamSteps, IndexTheirTokensWithoutABuild) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  for (const uint32_t prompt : {0U, 600U}) {
    keyhole_session_config c = small_session();
    c.index = "ivf:C=8,probe=4";
    c.budget.top_k = 12;
    SessionPtr host = make_session(host_engine.get(), c);
    SessionPtr stream = make_session(device.handle.get(), c);
    for (keyhole_session* s : {host.get(), stream.get()}) prefill(s, prompt, 5);
    compare(host.get(), stream.get(), 200, 1e-4);
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      const auto t = layer_tokens(stream.get(), l);
      EXPECT_GE(t.indexed, 100U);
      EXPECT_LE(t.pending, 2 * c.append_block + c.flush_block);
    }
  }
}

TEST_F(StreamSteps, TakeTurnsWithCallsInHostMemory) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  SessionPtr stream = make_session(device.handle.get(), small_session());
  for (uint32_t round = 0; round < 3; ++round) {
    for (keyhole_session* s : {host.get(), stream.get()}) {
      prefill(s, 40, 90 + round);
      ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
    }
    compare(host.get(), stream.get(), 7, 1e-5);
    const Token t = token();
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      EXPECT_EQ(attend_host(host.get(), l, t, nullptr), attend_host(stream.get(), l, t, nullptr));
    }
    for (keyhole_session* s : {host.get(), stream.get()}) {
      ASSERT_OK(keyhole_session_truncate(s, 30 * (round + 1)));
    }
    compare(host.get(), stream.get(), 5, 1e-5);
    stream = fork_of(stream.get());
    compare(host.get(), stream.get(), 5, 1e-5);
  }
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
  expect_error_text("tensor k holds NaN");
  t.k[70] = 1.0F;
  EXPECT_EQ(KEYHOLE_NOT_FINITE, enqueue(s.get(), 0, t, out, nullptr)) << "no more steps";
  // What all layers had completed is still there.
  SessionPtr other = fork_of(s.get());
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
  expect_error_text("50 ms");
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
  expect_error_text("did not answer");
  EXPECT_EQ(KEYHOLE_TIMEOUT, enqueue(s.get(), 0, t, out, nullptr)) << "no more steps";
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
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_attend(s.get(), 0, &q, &k, &v, &o, nullptr));
  const keyhole_tensor host_out = tensor(out, {hq(), d()});
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_attend(s.get(), 0, &q, nullptr, nullptr, &host_out, nullptr));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_attend(s.get(), 0, &q, nullptr, nullptr, &o, nullptr))
      << "no token to attend to";
  keyhole_tensor dk = k;
  dk.memory = KEYHOLE_DEVICE;
  ASSERT_OK(keyhole_session_attend_begin(s.get(), 0, &q, &dk, &v));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_attend_begin(s.get(), 1, &q, &dk, &v));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_truncate(s.get(), 0));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_attend_end(s.get(), &host_out, nullptr));
  ASSERT_OK(keyhole_session_attend_end(s.get(), &o, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));

  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_attend(host.get(), 0, &q, &dk, &v, &o, nullptr));
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_set_stream(host.get(), nullptr));
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_announce(host.get()));
  EXPECT_OK(keyhole_session_synchronize(host.get()));
}

TEST_F(StreamSteps, OfALaunchThatFailedAreNotWaitedFor) {
  for (const bool second_half : {false, true}) {
    // A wait for the query that never comes would outlast the test's own limit.
    StreamEngine device(engine_config_, 600000);
    SessionPtr s = make_session(device.handle.get(), small_session());
    const Token t = token();
    std::vector<float> out(t.q.size());
    ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
    (second_half ? device.faults.fails_to_end : device.faults.fails) = true;
    EXPECT_EQ(KEYHOLE_DEVICE_ERROR, enqueue(s.get(), 1, t, out, nullptr));
    EXPECT_EQ(KEYHOLE_DEVICE_ERROR, keyhole_session_synchronize(s.get()));
    EXPECT_EQ(KEYHOLE_DEVICE_ERROR, enqueue(s.get(), 0, t, out, nullptr)) << "no more steps";
  }
}

TEST_F(StreamSteps, DoNotWaitForEachOtherUnderAMemoryLimit) {
  StreamEngine device(engine_config_, 5000);
  keyhole_session_config c = small_session();
  c.host_memory_limit = size_t{1} << 30;
  SessionPtr s = make_session(device.handle.get(), c);
  prefill(s.get(), 100, 4);
  ASSERT_OK(keyhole_session_build(s.get(), nullptr,
                                  nullptr));  // else the steps would begin an index, which waits
  const Token t = token();
  std::vector<float> out(t.q.size());
  std::atomic<bool> go{false};
  device.stream.push([&] {
    while (!go) std::this_thread::yield();
  });
  // The stream has other work first: a step that waited for the one before would wait for good.
  EXPECT_OK(enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_OK(enqueue(s.get(), 1, t, out, nullptr));
  go = true;
  EXPECT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 101U);
}

TEST_F(StreamSteps, AreRefusedBeforeTheyPassAMemoryLimit) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = small_session();
  c.mode = KEYHOLE_MODE_EXACT;  // without indexes, so that steps alone take memory
  uint64_t held = 0;
  {
    SessionPtr s = make_session(device.handle.get(), c);
    prefill(s.get(), 100, 4);
    held = statistics(s.get()).host_bytes;
  }
  const uint64_t token_bytes = uint64_t{2} * engine_config_.kv_heads * engine_config_.head_dim * 2;
  const uint64_t overflow = (c.flush_block + 1) * token_bytes;
  c.host_memory_limit = held + 7 * overflow + overflow / 2;  // for two layers
  uint32_t taken[2] = {0, 0};
  for (const bool waits : {false, true}) {
    SessionPtr s = make_session(device.handle.get(), c);
    prefill(s.get(), 100, 4);
    const Token t = token();
    std::vector<float> out(t.q.size());
    keyhole_status status = KEYHOLE_OK;
    for (uint32_t step = 0; step < 400 && status == KEYHOLE_OK; ++step) {
      status = enqueue(s.get(), step % 2, t, out, nullptr);
      taken[waits] += status == KEYHOLE_OK ? 1 : 0;
      if (waits) {
        ASSERT_OK(keyhole_session_synchronize(s.get()));
      }
    }
    EXPECT_EQ(status, KEYHOLE_OUT_OF_MEMORY);
    expect_error_text("host_memory_limit");
    ASSERT_OK(keyhole_session_synchronize(s.get())) << "a step that was refused breaks nothing";
    EXPECT_LE(statistics(s.get()).host_bytes, c.host_memory_limit);
    EXPECT_GT(statistics(s.get()).host_bytes + overflow, c.host_memory_limit);
  }
  EXPECT_EQ(taken[0], taken[1]) << "what is forecast is what happens";
}

TEST_F(StreamSteps, OfASessionThatIndexesByItselfKeepWithinAMemoryLimit) {
  StreamEngine device(engine_config_);
  keyhole_session_config c = small_session();
  c.budget.top_k = 10;  // fewer than any index has: what searches take does not grow any more
  uint64_t held = 0;
  {
    SessionPtr s = make_session(device.handle.get(), c);
    prefill(s.get(), 100, 4);
    held = statistics(s.get()).host_bytes;
  }
  const uint64_t token_bytes = uint64_t{2} * engine_config_.kv_heads * engine_config_.head_dim * 2;
  for (const uint64_t tokens : {0, 20, 60, 200, 600}) {
    c.host_memory_limit = held + tokens * token_bytes;
    SessionPtr s = make_session(device.handle.get(), c);
    prefill(s.get(), 100, 4);
    const Token t = token();
    std::vector<float> out(t.q.size());
    keyhole_status status = KEYHOLE_OK;
    for (uint32_t step = 0; step < 2000 && status == KEYHOLE_OK; ++step) {
      status = enqueue(s.get(), step % 2, t, out, nullptr);
    }
    EXPECT_EQ(status, KEYHOLE_OUT_OF_MEMORY);
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    EXPECT_LE(statistics(s.get()).host_bytes, c.host_memory_limit) << tokens << " tokens' bytes";
  }
}

TEST_F(StreamSteps, TakeTensorsWhoseHeadsRunBackwards) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  SessionPtr s = make_session(device.handle.get(), small_session());
  for (keyhole_session* each : {host.get(), s.get()}) prefill(each, 30, 3);
  const Token t = token();
  const auto reversed = [&](const std::vector<float>& rows) {
    std::vector<float> r;
    for (auto end = rows.end(); end != rows.begin(); end -= d()) r.insert(r.end(), end - d(), end);
    return r;
  };
  const std::vector<float> q = reversed(t.q), k = reversed(t.k), v = reversed(t.v);
  std::vector<float> out(t.q.size(), NAN);
  const auto backwards = [&](const std::vector<float>& rows, int64_t heads) {
    keyhole_tensor x = on_device(rows, {heads, d()});
    x.data = const_cast<float*>(rows.data() + (heads - 1) * d());
    x.strides[0] = -d();
    return x;
  };
  const keyhole_tensor tq = backwards(q, hq()), tk = backwards(k, hkv()), tv = backwards(v, hkv()),
                       to = backwards(out, hq());
  ASSERT_OK(keyhole_session_attend(s.get(), 0, &tq, &tk, &tv, &to, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const auto truth = reversed(attend_host(host.get(), 0, t, nullptr));
  for (size_t i = 0; i < truth.size(); ++i) ASSERT_NEAR(out[i], truth[i], 1e-5);
}

// Of a prompt's queries in device memory only those leave it that the sample may take. The sample equals that from
// host memory, before its stride grows and after, however the prompt is cut, and wherever keys and values lie.
TEST_F(StreamSteps, QueriesInDeviceMemoryAreSampledAsThoseOfTheHost) {
  const TemporaryFolder folder;
  keyhole_session_config c = small_session();
  c.index = "roargraph:M=8";
  c.max_tokens = 1024;
  c.training_queries = 32;
  const auto saved = [&](keyhole_memory q_lies, keyhole_memory kv_lie, bool gaps,
                         const char* name) {
    StreamEngine engine(engine_config_);
    SessionPtr s = make_session(engine.handle.get(), c);
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      Numbers numbers(40 + l);
      for (const int64_t n : {20, 1, 3, 40, 200, 7, 150, 2, 90}) {
        const auto k = numbers.many(static_cast<size_t>(n * hkv() * d()));
        const auto v = numbers.many(k.size());
        const auto q = numbers.many(static_cast<size_t>(n * hq() * d()));
        // Rows with gaps between heads, all equally far apart.
        const int64_t stride = d() + (gaps ? 3 : 0);
        std::vector<float> apart(static_cast<size_t>(n * hq() * stride));
        for (int64_t i = 0; i < n * hq(); ++i) std::copy_n(&q[i * d()], d(), &apart[i * stride]);
        keyhole_tensor tk = tensor(k, {n, hkv(), d()}), tv = tensor(v, {n, hkv(), d()}),
                       tq = tensor(apart, {n, hq(), d()});
        tq.strides[0] = hq() * stride;
        tq.strides[1] = stride;
        tk.memory = tv.memory = kv_lie;
        tq.memory = q_lies;
        EXPECT_OK(keyhole_session_append(s.get(), l, &tk, &tv, &tq));
      }
    }
    const std::string path = folder / name;
    EXPECT_OK(keyhole_session_save(s.get(), path.c_str()));
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string host = saved(KEYHOLE_HOST, KEYHOLE_HOST, false, "host");
  ASSERT_GT(host.size(), size_t{32} * 64 * sizeof(float));
  EXPECT_EQ(saved(KEYHOLE_DEVICE, KEYHOLE_DEVICE, false, "device"), host);
  EXPECT_EQ(saved(KEYHOLE_DEVICE, KEYHOLE_DEVICE, true, "gaps"), host);
  EXPECT_EQ(saved(KEYHOLE_DEVICE, KEYHOLE_PINNED, false, "pinned"), host);
}

}  // namespace
}  // namespace keyhole::test
