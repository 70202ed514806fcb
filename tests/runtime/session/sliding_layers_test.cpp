// Layers with sliding windows beside attention in double precision over exactly their newest tokens, in every call that
// a session has.
#include <unistd.h>

#include <filesystem>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::test {
namespace {

class SlidingLayers : public LayerConfig {
 protected:
  void slide(uint32_t layer, uint32_t window, uint32_t slack = KEYHOLE_AUTO) {
    if (layers_.empty()) own_layers();
    layers_[layer].window = window;
    layers_[layer].window_slack = slack;
  }
};

TEST_F(SlidingLayers, AttendExactlyTheirWindow) {
  for (const uint32_t window : {1U, 2U, 16U, 61U, 500U}) {
    for (const uint32_t slack : {0U, 1U, 40U}) {
      SCOPED_TRACE("window " + std::to_string(window) + ", slack " + std::to_string(slack));
      slide(1, window, slack);
      const EnginePtr engine = make_engine(engine_config_);
      const SessionPtr s = make_session(engine.get(), small_session());
      Model model(engine_config_);
      for (const uint32_t chunk : {1U, 30U, 200U, 3U}) {
        prefill_model(s.get(), model, chunk);
        expect_all_exact(s.get(), model);
        for (int i = 0; i < 5; ++i) decode(s.get(), model);
        const keyhole_layer_tokens t = layer_tokens(s.get(), 1);
        EXPECT_EQ(t.total, model.tokens(1));
        EXPECT_EQ(t.window, std::min(window, model.tokens(1)));
        EXPECT_EQ(t.sink + t.indexed + t.pending, 0U);
      }
      ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
      for (const keyhole_mode mode :
           {KEYHOLE_MODE_INDEXED, KEYHOLE_MODE_EXACT, KEYHOLE_MODE_RESIDENT}) {
        ASSERT_OK(keyhole_session_set_mode(s.get(), mode, 0));
        expect_exact(s.get(), model, shape(), 1, numbers_);
      }
    }
  }
}

TEST_F(SlidingLayers, HaveSinksAndAudits) {
  const std::vector<float> sinks = {1, -3, 8, 0, 2, 15, -1, 4};
  engine_config_.sink_logits = sinks.data();
  slide(0, 20);
  const EnginePtr engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.audit_share = 1.0;
  const SessionPtr s = make_session(engine.get(), c);
  Model model(engine_config_);
  prefill_model(s.get(), model, 100);
  for (int i = 0; i < 30; ++i) decode(s.get(), model);
  keyhole_audit a;
  keyhole_audit_init(&a);
  ASSERT_OK(keyhole_session_get_audit(s.get(), 0, KEYHOLE_ALL, &a));
  EXPECT_EQ(a.audits, 30U * 4);
  EXPECT_LT(a.error_max, 1e-4);
  EXPECT_GT(a.mass_mean, 0.99999);
}

TEST_F(SlidingLayers, GoBackAsFarAsTheirSlack) {
  slide(1, 10, 4);
  const EnginePtr engine = make_engine(engine_config_);
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 100);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_truncate(s.get(), 95));
  expect_error_text("n_tokens is 95, layer 1 has a sliding window of 10");
  expect_error_text("allowed: 0, and from 96 on");
  EXPECT_EQ(layer_tokens(s.get(), 0).total, 100U) << "nothing was truncated";
  expect_all_exact(s.get(), model);
  ASSERT_OK(keyhole_session_truncate(s.get(), 96));
  model.truncate(96);
  expect_all_exact(s.get(), model);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_truncate(s.get(), 95));
  for (int i = 0; i < 3; ++i) decode(s.get(), model);
  ASSERT_OK(keyhole_session_truncate(s.get(), 96));
  model.truncate(96);
  for (int i = 0; i < 20; ++i) decode(s.get(), model);
  ASSERT_OK(keyhole_session_truncate(s.get(), 0));
  model.truncate(0);
  prefill_model(s.get(), model, 7);
  expect_all_exact(s.get(), model);
  ASSERT_OK(keyhole_session_truncate(s.get(), 3)) << "nothing has left the ring";
  model.truncate(3);
  expect_all_exact(s.get(), model);
}

TEST_F(SlidingLayers, AreCopiedWithTheirSession) {
  slide(1, 12, 5);
  const EnginePtr engine = make_engine(engine_config_);
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(engine_config_);
  const auto path =
      std::filesystem::temp_directory_path() / ("keyhole_windows_" + std::to_string(getpid()));
  for (const uint32_t tokens : {0U, 5U, 8U, 300U}) {
    if (tokens != 0) prefill_model(s.get(), model, tokens);
    const SessionPtr fork = fork_of(s.get());
    ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
    const SessionPtr loaded = load_of(engine.get(), path);
    for (keyhole_session* copy : {fork.get(), loaded.get()}) {
      Model own = model;
      if (tokens != 0) {
        expect_all_exact(copy, own);
        ASSERT_OK(keyhole_session_truncate(copy, own.tokens(1) - 3)) << "the slack is copied, too";
        own.truncate(own.tokens(1) - 3);
        expect_all_exact(copy, own);
      }
      for (int i = 0; i < 20; ++i) decode(copy, own);
    }
    if (tokens != 0) expect_all_exact(s.get(), model);
  }
  // An engine with another window.
  layers_[1].window = 13;
  const EnginePtr other = make_engine(engine_config_);
  keyhole_session* made = nullptr;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT,
            keyhole_session_load(other.get(), path.c_str(), nullptr, &made));
  EXPECT_NE(std::string(keyhole_last_error())
                .find("saved with a window of 12 and 5 tokens behind it in layer 1"),
            std::string::npos)
      << keyhole_last_error();
  std::filesystem::remove(path);
}

TEST_F(SlidingLayers, KeepNoMoreThanTheirWindow) {
  engine_config_.layers = 2;
  slide(0, 64, 8);
  slide(1, 64, 8);
  const EnginePtr engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.max_tokens = 50000;
  const SessionPtr s = make_session(engine.get(), c);
  const uint64_t before = statistics(s.get()).host_bytes;
  Model model(engine_config_);
  for (int i = 0; i < 3; ++i) prefill_model(s.get(), model, 5000);
  const uint64_t row = 64 * 2;
  EXPECT_EQ(statistics(s.get()).host_bytes - before, 2 * 2 * 2 * (64 + 8) * row);
  EXPECT_EQ(statistics(s.get()).tokens, 15000U);
  EXPECT_EQ(statistics(s.get()).device_bytes, 0U);
  expect_all_exact(s.get(), model);

  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  ASSERT_OK(keyhole_plan(&engine_config_, &c, 15000, 0, 0, &plan));
  EXPECT_EQ(plan.kv_bytes, 2 * 2 * 2 * (64 + 8) * row);
  EXPECT_EQ(plan.device_bytes, 0U);
  EXPECT_EQ(plan.index_bytes, 0U);
}

TEST_F(SlidingLayers, CountAgainstTheLimit) {
  slide(1, 4000);
  const EnginePtr engine = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  const SessionPtr free = make_session(engine.get(), c);
  c.host_memory_limit = statistics(free.get()).host_bytes + 200000;
  const SessionPtr s = make_session(engine.get(), c);
  Model model(engine_config_);
  prefill_both(s.get(), model, shape(), 1, 100, numbers_);
  const std::vector<float> k(shape().kv(1000), 1.0F);
  const auto t = tensor(k, {1000, 2, 64});
  EXPECT_EQ(KEYHOLE_OUT_OF_MEMORY, keyhole_session_append(s.get(), 1, &t, &t, nullptr));
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 100U);
  expect_exact(s.get(), model, shape(), 1, numbers_);
}

TEST_F(SlidingLayers, StayInHostMemoryBesideADeviceThatHasNone) {
  slide(1, 9);
  StreamEngine device(engine_config_, 2000, false);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 200);
  for (int i = 0; i < 40; ++i) decode(s.get(), model);
  const Token t = token();
  std::vector<float> out(t.q.size());
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, enqueue(s.get(), 1, t, out, nullptr));
  expect_error_text("layer 1 has a sliding window");
  ASSERT_OK(enqueue(s.get(), 0, t, out, nullptr));
  ASSERT_OK(keyhole_session_synchronize(s.get()));
  model.append(0, t.k, t.v);
  expect_all_exact(s.get(), model);
}

TEST_F(SlidingLayers, RandomCalls) {
  for (uint64_t seed = 0; seed < unless_sanitized(40, 8); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Numbers random(seed);
    numbers_ = Numbers(seed + 1000);
    layers_.clear();
    engine_config_ = small_engine(1 + random.below(3));
    engine_config_.layers = 3;
    engine_config_.layer_configs = nullptr;
    const uint32_t window = 1 + random.below(50), slack = 1 + random.below(30);
    slide(1, window, slack);
    if (random.below(2) == 0) slide(2, 1 + random.below(10), slack);
    const EnginePtr engine = make_engine(engine_config_);
    keyhole_session_config c = small_session();
    c.max_tokens = 1 + random.below(2) * 400 + 60;
    SessionPtr s = make_session(engine.get(), c);
    Model model(engine_config_);
    for (int call = 0; call < 40; ++call) {
      const uint32_t tokens = model.tokens(0), room = c.max_tokens - tokens;
      switch (random.below(5)) {
        case 0:
          if (room != 0) prefill_model(s.get(), model, 1 + random.below(std::min(room, 90U)));
          break;
        case 1: {
          if (tokens == 0) break;
          const uint32_t n = tokens - random.below(std::min(slack, tokens) + 1);
          const bool before = keyhole_session_truncate(s.get(), n) == KEYHOLE_OK;
          if (!before) {
            // Only tokens that an earlier truncation took the slack of.
            expect_error_text("sliding window");
            break;
          }
          model.truncate(n);
          break;
        }
        case 2: {
          s = fork_of(s.get());
          break;
        }
        default:
          for (uint32_t i = random.below(20); i != 0 && model.tokens(0) < c.max_tokens; --i) {
            decode(s.get(), model);
          }
      }
      if (model.tokens(0) != 0) expect_all_exact(s.get(), model);
    }
  }
}

}  // namespace
}  // namespace keyhole::test
