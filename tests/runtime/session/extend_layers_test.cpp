// Several new tokens in layers that have learned sinks, logits or a sliding window of their own, beside attention in
// double precision that has them, too.
#include <algorithm>
#include <bit>
#include <functional>

#include "keyhole/attention.h"
#include "tests/runtime/new_tokens.h"
#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::test {
namespace {

class ExtendLayers : public LayerConfig {
 protected:
  EnginePtr engine_with(const std::vector<uint32_t>& windows, uint32_t slack = KEYHOLE_AUTO) {
    own_layers();
    layers_[1].scale = 0.07F;
    layers_[1].softcap = 6.0F;
    for (uint32_t l = 0; l < layers_.size(); ++l) {
      layers_[l].window = windows[l];
      if (windows[l] != 0) layers_[l].window_slack = slack;
    }
    return make_engine(engine_config_);
  }
  NewTokens some_tokens(uint32_t n) { return new_tokens(shape(), n, numbers_); }
  void extend_and_check(keyhole_session* s, Model& model, uint32_t n, const uint64_t* mask) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      NewTokens t = some_tokens(n);
      ASSERT_OK(extend(s, shape(), l, t, mask));
      model.append(l, t.k, t.v);
      expect_answers(model, shape(), l, t, mask);
      if (HasFatalFailure()) return;
    }
  }
  /// Every layer attends exactly what it should.
  void expect_held(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < engine_config_.layers; ++l) {
      ASSERT_EQ(layer_tokens(s, l).total, model.tokens(l));
      if (model.tokens(l) != 0) expect_exact(s, model, shape(), l, numbers_);
      if (HasFatalFailure()) return;
    }
  }
  /// Two of the newest five tokens of all layers.
  void accept_some(keyhole_session* s, Model& model) {
    const uint32_t path[] = {0, 3};
    ASSERT_OK(keyhole_session_accept(s, 2, path));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) model.keep(l, 5, {0, 3});
    expect_held(s, model);
  }
  /// A token follows one before it, or none.
  std::vector<uint64_t> tree(uint32_t n) {
    std::vector<uint64_t> mask(n);
    for (uint32_t i = 0; i < n; ++i) {
      mask[i] = uint64_t{1} << i;
      if (i != 0 && numbers_.below(5) != 0) mask[i] |= mask[numbers_.below(i)];
    }
    return mask;
  }
  void set_sinks() {
    sinks_ = numbers_.many(size_t{engine_config_.layers} * engine_config_.q_heads);
    for (float& sink : sinks_) sink *= 2.0F;
    sinks_[1] = -INFINITY;
    engine_config_.sink_logits = sinks_.data();
  }

  std::vector<float> sinks_;
};

TEST_F(ExtendLayers, SinksAndLogitsCountOnceForEveryToken) {
  set_sinks();
  const EnginePtr engine = engine_with({0, 0});
  struct Way {
    const char* index;
    keyhole_mode mode;
    double audit_share;  ///< audited steps are of one token each
  };
  for (const Way& way :
       {Way{"flat", KEYHOLE_MODE_INDEXED, 0.0}, Way{"flat", KEYHOLE_MODE_EXACT, 0.0},
        Way{"codes:k=2,v=2", KEYHOLE_MODE_INDEXED, 0.0}, Way{"flat", KEYHOLE_MODE_INDEXED, 1.0}}) {
    SCOPED_TRACE(std::string(way.index) + ", mode " + std::to_string(way.mode));
    keyhole_session_config c = small_session();
    c.index = way.index;
    c.mode = way.mode;
    c.audit_share = way.audit_share;
    if (std::string(way.index) != "flat") {
      c.budget.tail = KEYHOLE_TAIL_CODES;
      c.budget.top_k = c.max_tokens = 1024;
    }
    const SessionPtr s = make_session(engine.get(), c);
    Model model(engine_config_);
    extend_and_check(s.get(), model, 3, nullptr);  // there are no others
    prefill_model(s.get(), model, 200);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (const uint32_t n : {1U, 2U, 8U, 9U, 40U, 130U}) {
      const auto mask = n <= 64 ? tree(n) : std::vector<uint64_t>();
      extend_and_check(s.get(), model, n, nullptr);
      if (n <= 64) extend_and_check(s.get(), model, n, mask.data());
      if (HasFatalFailure()) return;
    }
    if (way.audit_share == 0.0) continue;
    keyhole_audit audit;
    keyhole_audit_init(&audit);
    ASSERT_OK(keyhole_session_get_audit(s.get(), KEYHOLE_ALL, KEYHOLE_ALL, &audit));
    EXPECT_GT(audit.audits, 0U);
    EXPECT_LT(audit.error_max, 1e-4);
  }
}

TEST_F(ExtendLayers, BatchesHaveThemToo) {
  set_sinks();
  const EnginePtr engine = engine_with({0, 9});
  const SessionPtr s[2] = {make_session(engine.get(), small_session()),
                           make_session(engine.get(), small_session())};
  Model models[2] = {Model(engine_config_), Model(engine_config_)};
  prefill_model(s[0].get(), models[0], 70);
  const uint32_t starts[] = {0, 5, 17};
  for (uint32_t l = 0; l < 2; ++l) {
    NewTokens all = some_tokens(17);
    ASSERT_OK(extend_batch({s[0].get(), s[1].get()}, shape(), l, all, starts));
    for (uint32_t i = 0; i < 2; ++i) {
      const NewTokens own = part_of(all, shape(), starts[i], starts[i + 1]);
      models[i].append(l, own.k, own.v);
      expect_answers(models[i], shape(), l, own);
    }
  }
}

TEST_F(ExtendLayers, SlidingWindowsMoveFromTokenToToken) {
  for (const bool sinks : {false, true}) {
    if (sinks) set_sinks();
    for (const uint32_t window : {1U, 2U, 7U, 30U, 300U}) {
      SCOPED_TRACE("window " + std::to_string(window) + (sinks ? ", sinks" : ""));
      const EnginePtr engine = engine_with({window, 0}, 3);
      const SessionPtr s = make_session(engine.get(), small_session());
      Model model(engine_config_);
      for (const uint32_t n : {1U, 4U, 20U, 33U, 90U, 2U}) {
        extend_and_check(s.get(), model, n, nullptr);
        if (n <= 64) extend_and_check(s.get(), model, n, tree(n).data());
        if (HasFatalFailure()) return;
        expect_held(s.get(), model);
        // What a step left must not narrow the next one's window.
        decode(s.get(), model);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(ExtendLayers, ErrorsLeaveTheWindowAsItWas) {
  const EnginePtr engine = engine_with({5, 5}, 0);
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(engine_config_);
  extend_and_check(s.get(), model, 20, nullptr);
  NewTokens t = some_tokens(30);
  t.v.back() = NAN;
  EXPECT_EQ(KEYHOLE_NOT_FINITE, extend(s.get(), shape(), 0, t));
  t = some_tokens(30);
  t.q.back() = NAN;
  EXPECT_EQ(KEYHOLE_NOT_FINITE, extend(s.get(), shape(), 1, t));
  expect_held(s.get(), model);
}

TEST_F(ExtendLayers, AcceptDropsWithinTheSlack) {
  const EnginePtr engine = engine_with({0, 6}, 8);
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 100);
  const auto accept = [&](uint32_t n, const std::vector<uint32_t>& path, bool as_path) {
    const auto m = static_cast<uint32_t>(path.size());
    ASSERT_OK(keyhole_session_accept(s.get(), m, as_path ? path.data() : nullptr));
    for (uint32_t l = 0; l < engine_config_.layers; ++l) model.keep(l, n, path);
    expect_held(s.get(), model);
  };
  extend_and_check(s.get(), model, 8, nullptr);
  accept(8, {}, false);
  extend_and_check(s.get(), model, 8, nullptr);
  accept(8, {0, 1, 2}, false);
  extend_and_check(s.get(), model, 8, tree(8).data());
  accept(8, {1, 2, 5, 7}, true);
  extend_and_check(s.get(), model, 8, tree(8).data());
  accept(8, {0, 1, 6}, true);
  // More than the slack cannot be dropped, and nothing is then.
  extend_and_check(s.get(), model, 40, nullptr);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_accept(s.get(), 31, nullptr));
  expect_error_text("layer 1 has a sliding window of 6");
  expect_held(s.get(), model);
  std::vector<uint32_t> most(32);
  for (uint32_t i = 0; i < 32; ++i) most[i] = i;
  accept(40, most, false);
  // Of the first tokens of all, which have left, none can move up.
  ASSERT_OK(keyhole_session_truncate(s.get(), 0));
  model.truncate(0);
  extend_and_check(s.get(), model, 40, nullptr);
  const uint32_t path[] = {3, 39};
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_accept(s.get(), 2, path));
  expect_held(s.get(), model);
  accept(40, {}, false);
}

TEST_F(ExtendLayers, SlidingLayersOfADeviceThatHasNoneTakeHostMemoryAlone) {
  engine_with({0, 6}, 8);
  StreamEngine device(engine_config_, 2000, false);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 60);
  extend_and_check(s.get(), model, 5, nullptr);
  accept_some(s.get(), model);
  NewTokens t = some_tokens(5);
  const auto enqueue_all = [&](uint32_t layer) {
    return extend(s.get(), shape(), layer, t, nullptr, KEYHOLE_DEVICE);
  };
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, enqueue_all(1));
  expect_error_text("layer 1 has a sliding window");
  // One layer by way of the device, the other of the host: accepted together.
  ASSERT_OK(enqueue_all(0));
  ASSERT_OK(extend(s.get(), shape(), 1, t));
  for (uint32_t l = 0; l < 2; ++l) model.append(l, t.k, t.v);
  accept_some(s.get(), model);
}

TEST_F(ExtendLayers, EnginesWithAttentionOfTheirOwnGetNoSinksAndNoWindows) {
  set_sinks();
  const EnginePtr engine = engine_with({6, 0});
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(engine_config_);
  prefill_model(s.get(), model, 100);
  const auto q = numbers_.many(shape().q(1));
  Answer a{std::vector<float>(shape().q(1)), std::vector<float>(static_cast<size_t>(hq()))};
  const auto tq = tensor(q, {hq(), d()}), out = tensor(a.o, {hq(), d()});
  const uint32_t counts[] = {2, 2}, ids[] = {1, 50, 1, 50};
  std::vector<uint32_t> found(size_t{4} * 2), found_counts(4);
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_attend_offloaded(s.get(), 0, &tq, &out, nullptr));
  EXPECT_EQ(KEYHOLE_UNSUPPORTED,
            keyhole_session_attend_tokens(s.get(), 0, &tq, ids, counts, 0, &out, nullptr));
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_search_tokens(s.get(), 0, &tq, 2, found.data(),
                                                               nullptr, found_counts.data()));
  engine_config_.sink_logits = nullptr;
  const keyhole_layer_tokens held = layer_tokens(s.get(), 1);
  Model without(engine_config_);
  for (uint32_t l = 0; l < 2; ++l) without.append(l, model.keys(l), model.values(l));
  std::vector<double> lse;
  auto o = without.attend(
      1, q, lse, [&](uint32_t t) { return t >= held.sink && t < held.total - held.window; });
  ASSERT_OK(keyhole_session_attend_offloaded(s.get(), 1, &tq, &out, a.lse.data()));
  expect_near(a, o, lse);
  o = without.attend(1, q, lse, [](uint32_t t) { return t == 1 || t == 50; });
  ASSERT_OK(keyhole_session_attend_tokens(s.get(), 1, &tq, ids, counts, 0, &out, a.lse.data()));
  expect_near(a, o, lse);
}

}  // namespace
}  // namespace keyhole::test
