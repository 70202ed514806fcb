// Many queries answered by what a session holds, without an append, beside attention in double precision.
#include <cmath>
#include <string>
#include <vector>

#include "keyhole/batch.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

struct Answers {
  std::vector<float> q, o, lse;
};

Answers answers_of(keyhole_session* s, const Shape& shape, uint32_t layer, uint32_t n,
                   Numbers& numbers) {
  Answers a{numbers.many(shape.q(n)), std::vector<float>(shape.o(n), NAN),
            std::vector<float>(static_cast<size_t>(n * shape.hq), NAN)};
  const auto q = tensor(a.q, {n, shape.hq, shape.d}), out = tensor(a.o, {n, shape.hq, shape.dv});
  EXPECT_OK(keyhole_session_attend_queries(s, layer, &q, &out, a.lse.data()));
  return a;
}

/// Every query attends to all tokens of the layer, in a sliding one to its newest.
void expect_all_attended(keyhole_session* s, const Model& model, const Shape& shape, uint32_t layer,
                         uint32_t n, Numbers& numbers) {
  const uint32_t before = layer_tokens(s, layer).total;
  const Answers a = answers_of(s, shape, layer, n, numbers);
  ASSERT_EQ(before, layer_tokens(s, layer).total);
  for (uint32_t i = 0; i < n; ++i) {
    SCOPED_TRACE("query " + std::to_string(i) + " of " + std::to_string(n));
    std::vector<double> lse;
    const auto o = model.attend_all(layer, slice(a.q, shape.q(i), shape.q(i + 1)), lse);
    const auto heads = static_cast<size_t>(shape.hq);
    expect_near({slice(a.o, shape.o(i), shape.o(i + 1)), slice(a.lse, i * heads, (i + 1) * heads)},
                o, lse);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

struct QueriesCase {
  const char* name;
  const char* index;
  keyhole_mode mode;
  uint32_t value_dim;
  bool with_sinks;
  double audit_share;
};

class Queries : public testing::TestWithParam<QueriesCase> {};

TEST_P(Queries, AreAnsweredByAllThatIsStored) {
  auto config = small_engine(3);
  config.q_heads = 6;
  config.kv_heads = 2;
  config.value_dim = GetParam().value_dim;
  Numbers numbers(41);
  std::vector<float> sinks = numbers.many(size_t{config.layers} * config.q_heads);
  if (GetParam().with_sinks) config.sink_logits = sinks.data();
  const auto engine = make_engine(config);
  auto sc = small_session();
  sc.index = GetParam().index;
  sc.mode = GetParam().mode;
  sc.budget.top_k = 2000;
  sc.audit_share = GetParam().audit_share;
  const auto session = make_session(engine.get(), sc);
  Model model(config);
  const Shape shape(config);
  // In the sink alone, in the window too, then offloaded and pending, then indexed.
  for (const uint32_t more : {3U, 15U, 300U, 1U}) {
    for (uint32_t layer = 0; layer < config.layers; ++layer) {
      prefill_both(session.get(), model, shape, layer, more, numbers);
      for (const uint32_t n : {1U, 2U, 5U, 40U}) {
        expect_all_attended(session.get(), model, shape, layer, n, numbers);
      }
    }
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    expect_all_attended(session.get(), model, shape, 0, 9, numbers);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Queries,
    testing::Values(QueriesCase{"flat", "flat", KEYHOLE_MODE_INDEXED, 0, false, 0.0},
                    QueriesCase{"exact", "exact", KEYHOLE_MODE_EXACT, 0, true, 0.0},
                    QueriesCase{"ivf", "ivf:C=4,probe=4", KEYHOLE_MODE_INDEXED, 0, true, 0.0},
                    QueriesCase{"audited", "ivf:C=4,probe=4", KEYHOLE_MODE_INDEXED, 0, false, 1.0},
                    QueriesCase{"narrow_values", "flat", KEYHOLE_MODE_INDEXED, 32, false, 0.0}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(QueriesOf, SlidingLayersSeeTheWindow) {
  auto config = small_engine();
  std::vector<keyhole_layer_config> layers(config.layers);
  for (auto& layer : layers) keyhole_layer_config_init(&layer, &config);
  layers[1].window = 20;
  config.layer_configs = layers.data();
  config.layer_count = config.layers;
  const auto engine = make_engine(config);
  const auto session = make_session(engine.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(42);
  for (const uint32_t more : {7U, 20U, 90U}) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      prefill_both(session.get(), model, shape, layer, more, numbers);
      expect_all_attended(session.get(), model, shape, layer, 30, numbers);
    }
  }
}

// The rounds in which pending tokens are taken in do not depend on how many queries a call has.
TEST(QueriesOf, ACallIsOneStepOfTheIndex) {
  const auto config = small_engine();
  const auto engine = make_engine(config);
  auto sc = small_session();
  sc.index = "ivf:C=4,probe=4";
  sc.append_mode = KEYHOLE_APPEND_IN_STEP;
  sc.training_queries = 0;  // more of them would begin the first index anew
  const auto many = make_session(engine.get(), sc), one = make_session(engine.get(), sc);
  Model model(config);
  const Shape shape(config);
  for (keyhole_session* s : {many.get(), one.get()}) {
    Numbers numbers(43);
    prefill_both(s, model, shape, 0, 700, numbers);
  }
  Numbers numbers(44);
  for (uint64_t i = 0; i < 12; ++i) {
    (void)answers_of(many.get(), shape, 0, 25, numbers);
    (void)attend_only(one.get(), shape, 0, numbers.many(shape.q(1)));
    for (keyhole_session* s : {many.get(), one.get()}) {
      Numbers same(100 + i);
      prefill_both(s, model, shape, 0, 20, same);
    }
    EXPECT_EQ(layer_tokens(one.get(), 0).indexed, layer_tokens(many.get(), 0).indexed);
  }
  EXPECT_NE(0U, layer_tokens(many.get(), 0).indexed);
}

TEST(QueriesOf, HostMemoryAreAnsweredWithADeviceToo) {
  const auto config = small_engine(3);
  StreamEngine engine(config);
  const auto session = make_session(engine.handle.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(45);
  prefill_both(session.get(), model, shape, 0, 200, numbers);
  for (int i = 0; i < 5; ++i) {
    const auto q = numbers.many(shape.q(1)), k = numbers.many(shape.kv(1)),
               v = numbers.many(shape.kv(1));
    std::vector<float> o(shape.o(1));
    const auto tq = on_device(q, {shape.hq, shape.d}), tk = on_device(k, {shape.hkv, shape.d}),
               tv = on_device(v, {shape.hkv, shape.d}), out = on_device(o, {shape.hq, shape.d});
    ASSERT_OK(keyhole_session_attend(session.get(), 0, &tq, &tk, &tv, &out, nullptr));
    model.append(0, k, v);
    expect_all_attended(session.get(), model, shape, 0, 6, numbers);
  }
  const auto q = numbers.many(shape.q(2));
  std::vector<float> o(shape.o(2));
  const auto tq = on_device(q, {2, shape.hq, shape.d});
  const auto out = tensor(o, {2, shape.hq, shape.d});
  EXPECT_EQ(KEYHOLE_UNSUPPORTED,
            keyhole_session_attend_queries(session.get(), 0, &tq, &out, nullptr));
  expect_error_text("q lies in device memory, allowed: host memory");
}

TEST(QueriesOf, WhatIsWrongIsSaid) {
  const auto config = small_engine();
  const auto engine = make_engine(config);
  const auto session = make_session(engine.get(), small_session());
  Model model(config);
  const Shape shape(config);
  Numbers numbers(46);
  auto q = numbers.many(shape.q(3));
  std::vector<float> o(shape.o(3));
  auto tq = tensor(q, {3, shape.hq, shape.d});
  const auto out = tensor(o, {3, shape.hq, shape.d});
  const auto refused = [&](uint32_t layer, keyhole_status status, const std::string& text) {
    EXPECT_EQ(status, keyhole_session_attend_queries(session.get(), layer, &tq, &out, nullptr));
    expect_error_text(text);
  };
  refused(0, KEYHOLE_INVALID_ARGUMENT, "layer 0 holds no token to attend to");
  prefill_both(session.get(), model, shape, 0, 30, numbers);
  refused(config.layers, KEYHOLE_INVALID_ARGUMENT, "layer is");
  tq.shape[0] = 0;
  refused(0, KEYHOLE_INVALID_ARGUMENT, "tensor q has 0 tokens");
  tq.shape[0] = 2;
  refused(0, KEYHOLE_INVALID_ARGUMENT, "tensor out has 3 tokens, needed: 2");
  tq.shape[0] = 3;
  q[shape.q(2) + 1] = NAN;
  refused(0, KEYHOLE_NOT_FINITE, "q");
}

}  // namespace
}  // namespace keyhole::test
