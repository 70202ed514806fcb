// Learned sinks beside attention in double precision that has them: in every mode, through an index, in copies of a
// session, in audits and targets, and in steps on a stream.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "keyhole/save.h"
#include "keyhole/stream.h"
#include "tests/relative_error.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

/// Of two layers with four heads; one head has none.
std::vector<float> some_sinks() {
  return {1.5F, -2.0F, 6.0F, 12.0F, -std::numeric_limits<float>::infinity(), 3.0F, 0.0F, 20.0F};
}

class LearnedSinks : public StreamTest {
 protected:
  LearnedSinks() { engine_config_.sink_logits = sinks_.data(); }
  SessionPtr filled(keyhole_engine* engine, const keyhole_session_config& c, Model& model,
                    uint32_t tokens) {
    SessionPtr s = make_session(engine, c);
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      prefill_both(s.get(), model, shape(), l, tokens, numbers_);
    }
    EXPECT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    return s;
  }
  void expect_all_exact(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      expect_exact(s, model, shape(), l, numbers_);
    }
  }
  [[nodiscard]] Shape shape() const { return Shape(engine_config_); }

  std::vector<float> sinks_ = some_sinks();
};

TEST_F(LearnedSinks, AreCopiedAndReadBack) {
  const EnginePtr engine = make_engine(engine_config_);
  std::fill(sinks_.begin(), sinks_.end(), NAN);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  ASSERT_NE(seen.sink_logits, nullptr);
  EXPECT_EQ(std::vector<float>(seen.sink_logits, seen.sink_logits + 8), some_sinks());
}

TEST_F(LearnedSinks, OtherNumbersAreRefusedByName) {
  for (const float bad : {NAN, std::numeric_limits<float>::infinity()}) {
    sinks_ = some_sinks();
    sinks_[6] = bad;
    engine_config_.sink_logits = sinks_.data();
    keyhole_engine* engine = nullptr;
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_engine_create(&engine_config_, &engine));
    EXPECT_EQ(engine, nullptr);
    expect_error_text("sink_logits of layer 1, head 2");
  }
}

TEST_F(LearnedSinks, AreInEveryStepOfEveryMode) {
  const EnginePtr engine = make_engine(engine_config_);
  for (const char* index : {"flat", "ivf:C=8,probe=8", "codes:k=4,v=4"}) {
    for (const uint32_t tokens : {1U, 3U, 20U, 300U}) {
      SCOPED_TRACE(std::string(index) + ", tokens " + std::to_string(tokens));
      Model model(engine_config_);
      keyhole_session_config c = small_session();
      c.index = index;
      const SessionPtr s = filled(engine.get(), c, model, tokens);
      expect_all_exact(s.get(), model);
      ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 0));
      expect_all_exact(s.get(), model);
      ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_RESIDENT, 0));
      const auto q = numbers_.many(shape().q(1));
      const keyhole_layer_tokens held = layer_tokens(s.get(), 1);
      std::vector<double> lse;
      const auto o = model.attend(
          1, q, lse, [&](uint32_t t) { return t < held.sink || t >= held.total - held.window; });
      expect_near(attend_only(s.get(), shape(), 1, q), o, lse);
    }
  }
}

TEST_F(LearnedSinks, AreInCopies) {
  const EnginePtr engine = make_engine(engine_config_);
  Model model(engine_config_);
  const SessionPtr s = filled(engine.get(), small_session(), model, 200);
  const SessionPtr fork = fork_of(s.get());
  expect_all_exact(fork.get(), model);
  const auto path =
      std::filesystem::temp_directory_path() / ("keyhole_sinks_" + std::to_string(getpid()));
  ASSERT_OK(keyhole_session_save(s.get(), path.c_str()));
  const SessionPtr loaded = load_of(engine.get(), path);
  std::filesystem::remove(path);
  expect_all_exact(loaded.get(), model);
  ASSERT_OK(keyhole_session_truncate(s.get(), 0));
  model.truncate(0);
  prefill_both(s.get(), model, shape(), 0, 5, numbers_);
  expect_exact(s.get(), model, shape(), 0, numbers_);
}

keyhole_audit audit_of(keyhole_session* s) {
  keyhole_audit a;
  keyhole_audit_init(&a);
  EXPECT_OK(keyhole_session_get_audit(s, KEYHOLE_ALL, KEYHOLE_ALL, &a));
  return a;
}

TEST_F(LearnedSinks, CountAsReadInAudits) {
  const EnginePtr engine = make_engine(engine_config_);
  Model model(engine_config_);
  keyhole_session_config c = small_session();
  c.audit_share = 1.0;
  c.mode = KEYHOLE_MODE_RESIDENT;
  const SessionPtr s = filled(engine.get(), c, model, 200);
  double mass = 0.0, error = 0.0;
  for (uint32_t l = 0; l < 2; ++l) {
    auto q = numbers_.many(shape().q(1));
    for (float& x : q) x *= 0.125F;
    const keyhole_layer_tokens held = layer_tokens(s.get(), l);
    std::vector<double> lse, read;
    const auto truth = model.attend_all(l, q, lse);
    const auto o = model.attend(
        l, q, read, [&](uint32_t t) { return t < held.sink || t >= held.total - held.window; });
    expect_near(attend_only(s.get(), shape(), l, q), o, read);
    for (uint32_t h = 0; h < 4; ++h) {
      mass += std::exp(read[h] - lse[h]) / 8;
      error += relative_error(&o[h * size_t{64}], &truth[h * size_t{64}], 64) / 8;
    }
  }
  const keyhole_audit a = audit_of(s.get());
  EXPECT_EQ(a.audits, 8U);
  EXPECT_NEAR(a.mass_mean, mass, 1e-5);
  EXPECT_NEAR(a.error_mean, error, 1e-4);
}

TEST_F(LearnedSinks, CountAsReadForTargets) {
  uint64_t opened[2] = {};
  for (const bool strong : {false, true}) {
    std::fill(sinks_.begin(), sinks_.end(), strong ? 30.0F : -30.0F);
    const EnginePtr engine = make_engine(engine_config_);
    Model model(engine_config_);
    keyhole_session_config c = small_session();
    c.budget.attend = KEYHOLE_ATTEND_NONE;
    c.budget.mass_target = 0.99F;
    const SessionPtr s = filled(engine.get(), c, model, 1000);
    for (int i = 0; i < 4; ++i) {
      auto q = numbers_.many(shape().q(1));
      for (float& x : q) x *= 0.125F;
      (void)attend_only(s.get(), shape(), 0, q);
    }
    opened[strong ? 1 : 0] = statistics(s.get()).keys_opened;
  }
  EXPECT_GT(opened[0], 0U);
  EXPECT_EQ(opened[1], 0U);
}

TEST_F(LearnedSinks, AreInStepsOnAStream) {
  struct Case {
    const char* index;
    bool codes, partitions;
  };
  for (const Case& way : {Case{"flat", false, false}, Case{"codes:k=2,v=2", true, false},
                          Case{"flat", false, true}}) {
    SCOPED_TRACE(std::string(way.index) + (way.partitions ? ", partitions" : ""));
    keyhole_session_config c = small_session();
    c.index = way.index;
    if (way.codes) {
      c.flush_block = kCodeBlock;
      c.budget.top_k = 16;
      c.budget.tail = KEYHOLE_TAIL_CODES;
      c.offload_placement = KEYHOLE_PLACE_DEVICE;
    }
    if (way.partitions) {
      // All of them are read, so that steps are exact.
      c.budget.attend = KEYHOLE_ATTEND_NONE;
      c.budget.tail = KEYHOLE_TAIL_CENTROID;
      c.budget.min_keys = 4096;
    }
    c.audit_share = 1.0;
    StreamEngine device(engine_config_, 20000);
    const EnginePtr host_engine = make_engine(engine_config_);
    Model model(engine_config_);
    const SessionPtr stream = make_session(device.handle.get(), c);
    for (uint32_t l = 0; l < 2; ++l) prefill_both(stream.get(), model, shape(), l, 700, numbers_);
    ASSERT_OK(keyhole_session_build(stream.get(), nullptr, nullptr));
    for (int i = 0; i < 12; ++i) {
      for (uint32_t l = 0; l < 2; ++l) {
        const Token t = token();
        std::vector<float> lse(4, NAN);
        Answer answer{std::vector<float>(t.q.size(), NAN), {}};
        // Every third one with tensors in host memory.
        if (i % 3 == 2) {
          answer.o = attend_host(stream.get(), l, t, lse.data());
        } else {
          ASSERT_OK(enqueue(stream.get(), l, t, answer.o, lse.data(), i % 2 == 1));
          ASSERT_OK(keyhole_session_synchronize(stream.get()));
        }
        answer.lse = lse;
        model.append(l, t.k, t.v);
        std::vector<double> true_lse;
        const auto truth = model.attend_all(l, t.q, true_lse);
        expect_near(answer, truth, true_lse, 2e-3);
      }
    }
    const keyhole_audit a = audit_of(stream.get());
    EXPECT_EQ(a.audits, 12U * 2 * 4);
    EXPECT_LT(a.error_max, 1e-3);
    EXPECT_GT(a.mass_mean, 0.9999);
  }
}

}  // namespace
}  // namespace keyhole::test
