// Stream steps in captured graphs: what announce takes and refuses, and what other calls do during a capture.
#include <gtest/gtest.h>

#include <cmath>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

class StreamGraphs : public StreamTest {
 protected:
  /// A session of `tokens` tokens with nothing under way.
  SessionPtr ready(StreamEngine& device, int64_t tokens) {
    SessionPtr s = make_session(device.handle.get(), small_session());
    if (tokens > 0) prefill(s.get(), tokens, 3);
    EXPECT_OK(keyhole_session_synchronize(s.get()));
    return s;
  }
  /// Enqueues a token in all layers.
  void enqueue_token(keyhole_session* s, const Token& t, std::vector<float>& out) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) ASSERT_OK(enqueue(s, l, t, out, nullptr));
  }
  /// Captures `tokens` tokens in all layers, each of which is `t`.
  void capture(StreamEngine& device, keyhole_session* s, const Token& t, std::vector<float>& out,
               int tokens = 1) {
    device.stream.begin_capture();
    for (int i = 0; i < tokens; ++i) enqueue_token(s, t, out);
    device.stream.end_capture();
  }
  /// Announces and launches the graph that was captured last, and waits.
  static void launch(StreamEngine& device, keyhole_session* s) {
    ASSERT_OK(keyhole_session_announce(s));
    device.stream.launch_graph();
    ASSERT_OK(keyhole_session_synchronize(s));
  }
  void expect_refused(keyhole_status status, keyhole_session* s, const char* text) {
    EXPECT_EQ(status, keyhole_session_announce(s));
    expect_error_text(text);
  }
};

TEST_F(StreamGraphs, RunAtEachLaunch) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.append_mode = KEYHOLE_APPEND_IN_STEP;
  SessionPtr host = make_session(host_engine.get(), c);
  SessionPtr stream = make_session(device.handle.get(), c);
  for (keyhole_session* s : {host.get(), stream.get()}) {
    prefill(s, 90, 3);
    ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
  }
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce(stream.get()));
  ASSERT_OK(keyhole_session_synchronize(stream.get()));

  Token t = token();
  std::vector<float> out(t.q.size());
  capture(device, stream.get(), t, out);
  keyhole_layer_tokens tokens;
  keyhole_layer_tokens_init(&tokens);
  ASSERT_OK(keyhole_session_get_layer_tokens(stream.get(), 0, &tokens));
  EXPECT_EQ(tokens.total, 90U) << "a captured step has not happened";

  for (uint32_t i = 0; i < 80; ++i) {
    const Token next = token();
    std::copy(next.q.begin(), next.q.end(), t.q.begin());  // the graph reads the same memory
    std::copy(next.k.begin(), next.k.end(), t.k.begin());
    std::copy(next.v.begin(), next.v.end(), t.v.begin());
    std::fill(out.begin(), out.end(), NAN);
    launch(device, stream.get());
    (void)attend_host(host.get(), 0, next, nullptr);
    const auto truth = attend_host(host.get(), 1, next, nullptr);
    for (size_t j = 0; j < truth.size(); ++j) ASSERT_NEAR(out[j], truth[j], 1e-5) << i;
  }
  // A second capture replaces the first, without a plain step in between.
  capture(device, stream.get(), t, out);
  launch(device, stream.get());
  ASSERT_OK(keyhole_session_get_layer_tokens(stream.get(), 0, &tokens));
  EXPECT_EQ(tokens.total, 171U);

  ASSERT_OK(keyhole_session_set_mode(stream.get(), KEYHOLE_MODE_EXACT, 0));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce(stream.get()));
  expect_error_text("captur");
}

TEST_F(StreamGraphs, AnnouncedAndNeverLaunchedEndInATimeout) {
  StreamEngine device(engine_config_, 50);
  SessionPtr s = ready(device, 0);
  const Token t = token();
  std::vector<float> out(t.q.size());
  device.stream.begin_capture();
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  device.stream.end_capture();
  // The layer is empty, and the captured step will bring its first token.
  ASSERT_OK(keyhole_session_announce(s.get()));
  EXPECT_EQ(KEYHOLE_TIMEOUT, keyhole_session_synchronize(s.get()));
}

TEST_F(StreamGraphs, TwoCapturesInARowDoNotAddUp) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 50);
  const Token t = token();
  std::vector<float> out(t.q.size());
  // As a warm-up capture and the one that is kept.
  for (int i = 0; i < 2; ++i) capture(device, s.get(), t, out);
  for (uint32_t i = 1; i <= 3; ++i) {
    launch(device, s.get());
    EXPECT_EQ(layer_tokens(s.get(), 0).total, 50 + i);
    EXPECT_EQ(layer_tokens(s.get(), 1).total, 50 + i);
  }
}

TEST_F(StreamGraphs, OfOneTokenAndOfThreeAreLaunchedInAnyOrder) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 50);
  uint64_t one = 1;
  ASSERT_OK(keyhole_session_get_graph(s.get(), &one));
  EXPECT_EQ(one, 0U) << "nothing was captured";
  const Token t = token();
  std::vector<float> out(t.q.size());
  capture(device, s.get(), t, out);
  const FakeStream::Graph first = device.stream.graph();
  ASSERT_OK(keyhole_session_get_graph(s.get(), &one));
  capture(device, s.get(), t, out, 3);
  const FakeStream::Graph second = device.stream.graph();
  uint64_t three = 0;
  ASSERT_OK(keyhole_session_get_graph(s.get(), &three));
  EXPECT_NE(one, 0U);
  EXPECT_NE(one, three);
  uint32_t tokens = 50;
  for (const bool of_three : {false, true, true, false, true, false, false}) {
    ASSERT_OK(keyhole_session_announce_graph(s.get(), of_three ? three : one));
    device.stream.launch_graph(of_three ? second : first);
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    tokens += of_three ? 3 : 1;
    EXPECT_EQ(layer_tokens(s.get(), 0).total, tokens);
    EXPECT_EQ(layer_tokens(s.get(), 1).total, tokens);
  }
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce_graph(s.get(), 0));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce_graph(s.get(), three + 1));
  expect_error_text("capture it again");

  // Sixteen are known: the first of seventeen is not any more, the second is.
  for (int i = 0; i < 15; ++i) capture(device, s.get(), t, out);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce_graph(s.get(), one));
  ASSERT_OK(keyhole_session_announce_graph(s.get(), three));
  device.stream.launch_graph(second);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(layer_tokens(s.get(), 1).total, tokens + 3);
  ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 0));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_announce_graph(s.get(), three));
}

TEST_F(StreamGraphs, ACaptureThatWasGivenUpLeavesNothing) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 50);
  const Token t = token();
  std::vector<float> out(t.q.size());
  device.stream.begin_capture();
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  device.stream.end_capture();  // the caller's own kernels could not be captured, say
  capture(device, s.get(), t, out);
  launch(device, s.get());
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 51U);
}

TEST_F(StreamGraphs, AreCapturedAgainAfterALaunchThatFailed) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 50);
  const Token t = token();
  std::vector<float> out(t.q.size());
  device.stream.begin_capture();
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  device.faults.fails_to_end = true;
  EXPECT_EQ(KEYHOLE_DEVICE_ERROR, enqueue(s.get(), 1, t, out, nullptr));
  device.faults.fails_to_end = false;
  device.stream.end_capture();
  expect_refused(KEYHOLE_INVALID_ARGUMENT, s.get(), "capture it again");
  capture(device, s.get(), t, out);
  launch(device, s.get());
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 51U);
}

TEST_F(StreamGraphs, OfACaptureThatWasLostAreRefused) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 50);
  const Token t = token();
  std::vector<float> out(t.q.size());
  device.stream.begin_capture();
  EXPECT_THROW(device.stream.synchronize(), Error);  // the caller's mistake
  EXPECT_EQ(KEYHOLE_BUSY, enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 50U);
  device.stream.end_capture();
  enqueue_token(s.get(), t, out);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 51U);
}

TEST_F(StreamGraphs, CallsDuringACaptureAnswerOrAreRefusedAndHarmNothing) {
  StreamEngine device(engine_config_);
  EnginePtr host_engine = make_engine(engine_config_);
  SessionPtr host = make_session(host_engine.get(), small_session());
  SessionPtr s = make_session(device.handle.get(), small_session());
  for (keyhole_session* each : {host.get(), s.get()}) prefill(each, 60, 3);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  const Token first = token();
  std::vector<float> out(first.q.size(), NAN);
  enqueue_token(s.get(), first, out);  // still under way when the capture begins
  for (uint32_t l = 0; l < 2; ++l) (void)attend_host(host.get(), l, first, nullptr);

  const Token t = token();
  device.stream.begin_capture();
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 61U);
  EXPECT_EQ(statistics(s.get()).stream_steps, 2U);
  keyhole_session_config config;
  keyhole_session_config_init(&config);
  EXPECT_OK(keyhole_session_get_config(s.get(), &config));
  keyhole_budget budget;
  keyhole_budget_init(&budget);
  EXPECT_OK(keyhole_session_get_budget(s.get(), 0, 0, &budget));

  const keyhole_tensor q = tensor(t.q, {hq(), d()}), k = tensor(t.k, {hkv(), d()}),
                       v = tensor(t.v, {hkv(), d()}), o = tensor(out, {hq(), d()});
  const keyhole_tensor k1 = tensor(t.k, {1, hkv(), d()}), v1 = tensor(t.v, {1, hkv(), d()});
  keyhole_session* copy = nullptr;
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  keyhole_session* p = s.get();
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_set_index(p, "flat"));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_set_mode(p, KEYHOLE_MODE_EXACT, 0));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_set_attend(p, KEYHOLE_ATTEND_NONE, 0.0F));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_set_budget(p, 0, 0, &budget));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_append(p, 0, &k1, &v1, nullptr));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_build(p, nullptr, nullptr));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_attend(p, 0, &q, &k, &v, &o, nullptr));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_attend_begin(p, 0, &q, &k, &v));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_set_stream(p, nullptr));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_announce(p));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_synchronize(p));
  expect_error_text("capture");
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_truncate(p, 1));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_fork(p, &copy));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_save(p, "not-written.keyhole"));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_reset_statistics(p));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_get_audit(p, 0, 0, &audit));

  ASSERT_OK(enqueue(s.get(), 1, t, out, nullptr));
  device.stream.end_capture();
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  std::fill(out.begin(), out.end(), NAN);
  launch(device, s.get());
  (void)attend_host(host.get(), 0, t, nullptr);
  const auto truth = attend_host(host.get(), 1, t, nullptr);
  for (size_t i = 0; i < truth.size(); ++i) ASSERT_NEAR(out[i], truth[i], 1e-5);
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 62U);
}

TEST_F(StreamGraphs, BothHalvesOfAStepBelongToOneCapture) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 20);
  const Token t = token();
  std::vector<float> out(t.q.size());
  const keyhole_tensor q = on_device(t.q, {hq(), d()}), k = on_device(t.k, {hkv(), d()}),
                       v = on_device(t.v, {hkv(), d()}), o = on_device(out, {hq(), d()});
  // Begun outside, ended inside: refused, and the step can still end outside.
  ASSERT_OK(keyhole_session_attend_begin(s.get(), 0, &q, &k, &v));
  device.stream.begin_capture();
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_attend_end(s.get(), &o, nullptr));
  device.stream.end_capture();
  EXPECT_OK(keyhole_session_attend_end(s.get(), &o, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 21U);
  // Begun inside, ended outside: there is no such step, and the graph is of no use.
  device.stream.begin_capture();
  ASSERT_OK(keyhole_session_attend_begin(s.get(), 0, &q, &k, &v));
  device.stream.end_capture();
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_attend_end(s.get(), &o, nullptr));
  expect_refused(KEYHOLE_INVALID_ARGUMENT, s.get(), "capture it again");
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 22U);
}

TEST_F(StreamGraphs, OfSeveralTokensAreAnnouncedWholeOrNotAtAll) {
  StreamEngine device(engine_config_, 500);
  keyhole_session_config c = small_session();
  c.max_tokens = 40;
  SessionPtr s = make_session(device.handle.get(), c);
  const Token t = token();
  std::vector<float> out(t.q.size());
  prefill(s.get(), 34, 3);
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  capture(device, s.get(), t, out, 3);
  launch(device, s.get());
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 37U);
  launch(device, s.get());
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 40U);
  expect_refused(KEYHOLE_INVALID_ARGUMENT, s.get(), "max_tokens");
  ASSERT_OK(keyhole_session_truncate(s.get(), 38));
  expect_refused(KEYHOLE_INVALID_ARGUMENT, s.get(), "41 tokens");
  ASSERT_OK(keyhole_session_synchronize(s.get())) << "nothing was submitted";
  ASSERT_OK(keyhole_session_truncate(s.get(), 37));
  launch(device, s.get());
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 40U);
}

TEST_F(StreamGraphs, NeedASessionThatStaysAsItIs) {
  StreamEngine device(engine_config_);
  SessionPtr s = make_session(device.handle.get(), small_session());
  const Token t = token();
  std::vector<float> out(t.q.size());
  prefill(s.get(), 50, 3);
  for (const bool stream_changes : {false, true}) {
    ASSERT_OK(keyhole_session_synchronize(s.get()));
    capture(device, s.get(), t, out);
    launch(device, s.get());
    if (stream_changes) {
      ASSERT_OK(keyhole_session_set_stream(s.get(), nullptr));
    } else {
      ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 0));
    }
    expect_refused(KEYHOLE_INVALID_ARGUMENT, s.get(), "has changed");
  }
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 52U);
}

TEST_F(StreamGraphs, MayAppendTheFirstTokenOfALayerAndAttendToIt) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 0);
  const Token t = token();
  std::vector<float> out(t.q.size());
  const keyhole_tensor q = on_device(t.q, {hq(), d()}), o = on_device(out, {hq(), d()});
  device.stream.begin_capture();
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  ASSERT_OK(keyhole_session_attend(s.get(), 0, &q, nullptr, nullptr, &o, nullptr));
  device.stream.end_capture();
  launch(device, s.get());
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 1U);
  // One token: its value is the answer.
  for (int64_t h = 0; h < hq(); ++h) {
    for (int64_t i = 0; i < d(); ++i) {
      ASSERT_NEAR(out[h * d() + i], t.v[h / (hq() / hkv()) * d() + i], 1e-5);
    }
  }
}

TEST_F(StreamGraphs, HoldAsManyStepsAsCanBeSubmitted) {
  StreamEngine device(engine_config_);
  SessionPtr s = ready(device, 2);
  const Token t = token();
  std::vector<float> out(t.q.size());
  const keyhole_tensor q = on_device(t.q, {hq(), d()}), o = on_device(out, {hq(), d()});
  device.stream.begin_capture();
  for (int i = 0; i < 4096; ++i) {
    ASSERT_OK(keyhole_session_attend(s.get(), 0, &q, nullptr, nullptr, &o, nullptr));
  }
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_attend(s.get(), 0, &q, nullptr, nullptr, &o, nullptr));
  expect_error_text("4096");
  device.stream.end_capture();
  expect_refused(KEYHOLE_INVALID_ARGUMENT, s.get(), "capture it again");
}

}  // namespace
}  // namespace keyhole::test
