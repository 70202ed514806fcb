// Tokens taken out of the middle of a session, and keys turned to other positions, beside exact attention in double
// precision over what is left.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "keyhole/batch.h"
#include "keyhole/stream.h"
#include "tests/runtime/stream_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

/// RoPE as its definition has it: pair i of r / 2 turns by position * theta^(-2i/r) / factor.
struct Rope {
  double theta = 10000.0;
  uint32_t r = 64;
  bool interleaved = false;
  double factor = 1.0;

  void turn(float* row, int64_t position) const {
    for (uint32_t i = 0; i < r / 2; ++i) {
      const double angle = static_cast<double>(position) * std::pow(theta, -2.0 * i / r) / factor;
      float& low = row[interleaved ? 2 * i : i];
      float& high = row[interleaved ? 2 * i + 1 : i + r / 2];
      const double a = low, b = high;
      low = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      high = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
    }
  }
};

/// Takes tokens [first, first + count) out of `[tokens, width]`.
void erase_rows(std::vector<float>& rows, size_t width, uint32_t first, uint32_t count) {
  const size_t tokens = rows.size() / width;
  const size_t begin = std::min<size_t>(first, tokens),
               end = std::min<size_t>(size_t{first} + count, tokens);
  rows.erase(rows.begin() + static_cast<ptrdiff_t>(begin * width),
             rows.begin() + static_cast<ptrdiff_t>(end * width));
}

void remove_of(Model& model, uint32_t layers, uint32_t first, uint32_t count) {
  for (uint32_t l = 0; l < layers; ++l) model.remove(l, first, count);
}

struct RemovalCase {
  const char* name;
  const char* index;
  keyhole_dtype kv_dtype;
  uint32_t value_dim;
  int32_t values_in_keys;
  double tolerance;
};

class Remove : public testing::TestWithParam<RemovalCase> {
 protected:
  Remove() {
    config_.kv_dtype = GetParam().kv_dtype;
    config_.value_dim = GetParam().value_dim;
    config_.values_in_keys = GetParam().values_in_keys;
    config_.rope_theta = 10000.0F;
    engine_ = make_engine(config_);
  }
  keyhole_session_config session_config() const {
    auto sc = small_session();
    sc.index = GetParam().index;
    sc.budget.top_k = 1000;
    sc.max_tokens = 3000;
    return sc;
  }
  void append(keyhole_session* s, Model& model, uint32_t n) {
    for (uint32_t l = 0; l < config_.layers; ++l) prefill_both(s, model, shape(), l, n, numbers_);
  }
  void expect_all(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < config_.layers; ++l) {
      const auto t = layer_tokens(s, l);
      ASSERT_EQ(model.tokens(l), t.total);
      ASSERT_EQ(t.total, t.sink + t.window + t.indexed + t.pending);
      if (t.total == 0) continue;
      const auto q = numbers_.many(shape().q(1));
      std::vector<double> lse;
      const auto o = model.attend_all(l, q, lse);
      expect_near(attend_only(s, shape(), l, q), o, lse, GetParam().tolerance);
      if (HasFatalFailure()) return;
    }
  }
  [[nodiscard]] Shape shape() const { return Shape(config_); }

  keyhole_engine_config config_ = small_engine();
  EnginePtr engine_;
  Numbers numbers_{61};
};

TEST_P(Remove, AnswersAreThoseOfTheTokensThatAreLeft) {
  const auto session = make_session(engine_.get(), session_config());
  Model model(config_);
  append(session.get(), model, 900);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  for (uint32_t i = 0; i < cases(24); ++i) {
    const uint32_t tokens = model.tokens(0);
    const uint32_t first = i % 4 == 0 ? numbers_.below(6) : numbers_.below(tokens + 2);
    const uint32_t count =
        i % 5 == 0 ? UINT32_MAX - first : numbers_.below(1 + numbers_.below(200));
    SCOPED_TRACE(std::to_string(first) + " and " + std::to_string(count) + " more of " +
                 std::to_string(tokens));
    ASSERT_OK(keyhole_session_remove(session.get(), first, count, 0));
    remove_of(model, config_.layers, first, count);
    expect_all(session.get(), model);
    if (HasFatalFailure()) return;
    append(session.get(), model, 1 + numbers_.below(model.tokens(0) < 300 ? 400 : 60));
    expect_all(session.get(), model);
    if (i % 3 == 0) {
      ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    }
    expect_all(session.get(), model);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Remove,
    testing::Values(
        RemovalCase{"flat", "flat", KEYHOLE_F16, 0, 0, 1e-4},
        RemovalCase{"ivf", "ivf:C=4,probe=16777216", KEYHOLE_BF16, 0, 0, 1e-4},
        RemovalCase{"undone", "ivf:C=4,probe=16777216,rope=undo", KEYHOLE_F32, 0, 0, 1e-4},
        RemovalCase{"roargraph", "roargraph:M=8,ef=100000,Nq=10,beam=12", KEYHOLE_F16, 0, 0, 1e-4},
        RemovalCase{"codes", "codes:k=4,v=4", KEYHOLE_F16, 0, 0, 0.1},
        RemovalCase{"narrow_values", "flat", KEYHOLE_F16, 48, 0, 1e-4},
        RemovalCase{"values_in_keys", "flat", KEYHOLE_BF16, 48, 1, 1e-4}),
    [](const auto& test) { return std::string(test.param.name); });

// Keys that were turned by their places in the text are turned to the places that they take: the session is one that
// was given the shorter text.
class Shift : public testing::TestWithParam<Rope> {};

TEST_P(Shift, KeysTakeThePlacesOfThoseThatWent) {
  const Rope rope = GetParam();
  auto config = small_engine();
  config.kv_dtype = KEYHOLE_F32;
  config.rope_theta = static_cast<float>(rope.theta);
  config.rope_dim = rope.r;
  config.rope_interleaved = rope.interleaved ? 1 : 0;
  if (rope.factor != 1.0) {
    config.rope_scaling = KEYHOLE_ROPE_LINEAR;
    config.rope_factor = static_cast<float>(rope.factor);
  }
  const auto engine = make_engine(config);
  const Shape shape(config);
  Numbers numbers(62);
  constexpr uint32_t kTokens = 700;
  const auto plain = numbers.many(shape.kv(kTokens)), v = numbers.many(shape.kv(kTokens));
  const auto turned = [&](std::vector<float> keys, uint32_t from) {
    for (size_t i = 0; i < keys.size() / static_cast<size_t>(shape.d); ++i) {
      rope.turn(keys.data() + i * static_cast<size_t>(shape.d),
                from + static_cast<int64_t>(i) / shape.hkv);
    }
    return keys;
  };
  const auto session = make_session(engine.get(), small_session());
  const auto k = turned(plain, 0);
  const auto tk = tensor(k, {kTokens, shape.hkv, shape.d}),
             tv = tensor(v, {kTokens, shape.hkv, shape.d});
  ASSERT_OK(keyhole_session_append(session.get(), 0, &tk, &tv, nullptr));
  auto left = plain;
  auto left_v = v;
  // Behind a sink that stays, as a context shift does it; across sink and window; at the end.
  for (const auto& [first, count] : std::vector<std::pair<uint32_t, uint32_t>>{
           {4, 250}, {1, 9}, {300, 33}, {390, 1}, {0, 30}, {370, 100}}) {
    SCOPED_TRACE(std::to_string(first) + ", " + std::to_string(count));
    ASSERT_OK(keyhole_session_remove(session.get(), first, count, -static_cast<int32_t>(count)));
    erase_rows(left, shape.kv(1), first, count);
    erase_rows(left_v, shape.kv(1), first, count);
    Model model(config);
    const auto expected = turned(left, 0);
    model.append(0, expected, left_v);
    ASSERT_EQ(model.tokens(0), layer_tokens(session.get(), 0).total);
    std::vector<float> rows(expected.size());
    const auto n = static_cast<int64_t>(model.tokens(0));
    const auto all = tensor(rows, {n, shape.hkv, shape.d});
    ASSERT_OK(keyhole_session_get_rows(session.get(), 0, 0, &all, nullptr));
    for (size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(expected[i], rows[i], 2e-5) << i;
    auto q = numbers.many(shape.q(1));
    for (int64_t h = 0; h < shape.hq; ++h) rope.turn(q.data() + h * shape.d, n);
    std::vector<double> lse;
    const auto o = model.attend_all(0, q, lse);
    expect_near(attend_only(session.get(), shape, 0, q), o, lse, 1e-3);
    if (HasFatalFailure()) return;
  }
  // And back: nothing goes, and all are where they were.
  ASSERT_OK(keyhole_session_remove(session.get(), 20, 0, 1000));
  ASSERT_OK(keyhole_session_remove(session.get(), 20, 0, -1000));
  std::vector<float> rows(left.size());
  const auto all =
      tensor(rows, {static_cast<int64_t>(left.size() / shape.kv(1)), shape.hkv, shape.d});
  ASSERT_OK(keyhole_session_get_rows(session.get(), 0, 0, &all, nullptr));
  const auto expected = turned(left, 0);
  for (size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(expected[i], rows[i], 4e-5) << i;
}

INSTANTIATE_TEST_SUITE_P(Ropes, Shift,
                         testing::Values(Rope{}, Rope{500000.0, 64, true}, Rope{10000.0, 32, false},
                                         Rope{10000.0, 32, true}, Rope{10000.0, 64, false, 4.0}));

class RemoveOf : public testing::Test {
 protected:
  void append(keyhole_session* s, Model& model, uint32_t n) {
    for (uint32_t l = 0; l < config_.layers; ++l) prefill_both(s, model, shape_, l, n, numbers_);
  }
  void expect_all_exact(keyhole_session* s, const Model& model) {
    for (uint32_t l = 0; l < config_.layers; ++l) {
      ASSERT_EQ(model.tokens(l), layer_tokens(s, l).total);
      expect_exact(s, model, shape_, l, numbers_);
    }
  }
  void remove_both(keyhole_session* s, Model& model, uint32_t first, uint32_t count) {
    ASSERT_OK(keyhole_session_remove(s, first, count, 0));
    remove_of(model, config_.layers, first, count);
  }

  keyhole_engine_config config_ = small_engine();
  Shape shape_{config_};
  Numbers numbers_{63};
};

TEST_F(RemoveOf, WhatLiesBeforeStaysIndexed) {
  const auto engine = make_engine(config_);
  auto sc = small_session();
  sc.index = "ivf:C=8,probe=8";
  const auto session = make_session(engine.get(), sc);
  Model model(config_);
  append(session.get(), model, 1000);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  remove_both(session.get(), model, 604, 100);
  const auto t = layer_tokens(session.get(), 0);
  EXPECT_EQ(600U, t.indexed);
  EXPECT_EQ(900U, t.total);
  EXPECT_LT(200U, t.pending);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  EXPECT_EQ(0U, layer_tokens(session.get(), 0).pending);
  expect_all_exact(session.get(), model);
}

TEST_F(RemoveOf, CopiesKeepTheirTokens) {
  const auto engine = make_engine(config_);
  auto session = make_session(engine.get(), small_session());
  Model model(config_);
  append(session.get(), model, 2000);
  const auto copy = fork_of(session.get());
  Model copied = model;
  remove_both(session.get(), model, 1500, 200);
  // What lies before the cut is shared as before.
  const auto shared = statistics(copy.get()).shared_bytes + statistics(session.get()).shared_bytes;
  EXPECT_GT(shared, uint64_t{2} * 2 * 2 * shape_.kv(1300));
  expect_all_exact(session.get(), model);
  expect_all_exact(copy.get(), copied);
  remove_both(copy.get(), copied, 3, 1600);
  expect_all_exact(copy.get(), copied);
  expect_all_exact(session.get(), model);
  session.reset();
  append(copy.get(), copied, 300);
  expect_all_exact(copy.get(), copied);
}

TEST_F(RemoveOf, ItIsSavedAndLoaded) {
  config_.rope_theta = 10000.0F;
  const auto engine = make_engine(config_);
  auto sc = small_session();
  sc.index = "roargraph:M=8,ef=100000,Nq=10,beam=12";
  sc.training_queries = 32;
  const auto session = make_session(engine.get(), sc);
  Model model(config_);
  constexpr uint32_t kTokens = 700;
  for (uint32_t l = 0; l < config_.layers; ++l) {
    const auto k = numbers_.many(shape_.kv(kTokens)), v = numbers_.many(shape_.kv(kTokens)),
               q = numbers_.many(shape_.q(kTokens));
    const auto tk = tensor(k, {kTokens, shape_.hkv, shape_.d}),
               tv = tensor(v, {kTokens, shape_.hkv, shape_.d}),
               tq = tensor(q, {kTokens, shape_.hq, shape_.d});
    ASSERT_OK(keyhole_session_append(session.get(), l, &tk, &tv, &tq));
    model.append(l, k, v);
  }
  remove_both(session.get(), model, 5, 321);
  TemporaryFolder folder;
  const std::string path = folder / "session";
  ASSERT_OK(keyhole_session_save(session.get(), path.c_str()));
  const auto loaded = load_of(engine.get(), path);
  for (keyhole_session* s : {session.get(), loaded.get()}) {
    ASSERT_OK(keyhole_session_build(s, nullptr, nullptr));
    expect_all_exact(s, model);
  }
  // Queries that moved along, of odd places, are a sample that a file may have, and guide both alike.
  const auto q = numbers_.many(shape_.q(1));
  EXPECT_EQ(attend_only(session.get(), shape_, 0, q).o, attend_only(loaded.get(), shape_, 0, q).o);
}

TEST_F(RemoveOf, RowsInInt8AreRoundedAgain) {
  const auto engine = make_engine(config_);
  auto sc = small_session();
  sc.kv_host = KEYHOLE_KV_HOST_INT8;
  sc.flush_block = 256;
  const auto session = make_session(engine.get(), sc);
  Model model(config_);
  append(session.get(), model, 1500);
  ASSERT_OK(keyhole_session_remove(session.get(), 100, 77, 0));
  remove_of(model, config_.layers, 100, 77);
  // Each rounding moves a number by half a step of its channel's scale at most, and by bf16's rounding of the scale.
  std::vector<float> rows(shape_.kv(model.tokens(0)));
  const auto all = tensor(rows, {model.tokens(0), shape_.hkv, shape_.d});
  ASSERT_OK(keyhole_session_get_rows(session.get(), 0, 0, &all, nullptr));
  for (size_t i = 0; i < rows.size(); ++i) {
    const float k = model.keys(0)[i];
    ASSERT_NEAR(k, rows[i], 2 * (4.0F / 254 + std::abs(k) / 128)) << i;
  }
  model.keys(0) = rows;
  ASSERT_OK(keyhole_session_get_rows(session.get(), 0, 0, nullptr, &all));
  model.values(0) = rows;
  // These rows are f16, in which not every multiple of a scale is exact.
  const auto q = numbers_.many(shape_.q(1));
  std::vector<double> lse;
  const auto o = model.attend_all(0, q, lse);
  expect_near(attend_only(session.get(), shape_, 0, q), o, lse, 4e-3);
}

TEST_F(RemoveOf, SlidingLayersKeepTheirWindow) {
  std::vector<keyhole_layer_config> layers(config_.layers);
  for (auto& layer : layers) keyhole_layer_config_init(&layer, &config_);
  layers[1].window = 20;
  layers[1].window_slack = 30;
  config_.layer_configs = layers.data();
  config_.layer_count = config_.layers;
  const auto engine = make_engine(config_);
  const auto session = make_session(engine.get(), small_session());
  Model model(config_);
  append(session.get(), model, 300);
  remove_both(session.get(), model, 40, 100);  // long gone from the ring
  expect_all_exact(session.get(), model);
  remove_both(session.get(), model, 185, 10);  // of 150..199, among its newest
  expect_all_exact(session.get(), model);
  remove_both(session.get(), model, 145, 20);  // some of them are gone, and the others leave 25
  expect_all_exact(session.get(), model);
  append(session.get(), model, 5);
  expect_all_exact(session.get(), model);
  // 30 are there, of 145..174, and 17 of them would be left.
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_remove(session.get(), 150, 13, 0));
  expect_error_text("layer 1 has a sliding window of 20");
  expect_error_text("it has 17, needed: 20");
  expect_all_exact(session.get(), model);
  remove_both(session.get(), model, 0, UINT32_MAX);
  append(session.get(), model, 70);
  remove_both(session.get(), model, 60, UINT32_MAX);  // a truncation
  expect_all_exact(session.get(), model);
}

/// A sliding layer's keys are turned by its own RoPE, as those of the full layer are by the engine's.
TEST_F(RemoveOf, KeysOfSlidingLayersTakeTheirPlaces) {
  const Rope ropes[] = {{10000.0, 64, false}, {500000.0, 32, true}};
  config_.kv_dtype = KEYHOLE_F32;
  config_.rope_theta = static_cast<float>(ropes[0].theta);
  std::vector<keyhole_layer_config> layers(config_.layers);
  for (auto& layer : layers) keyhole_layer_config_init(&layer, &config_);
  layers[1].window = 20;
  layers[1].window_slack = 40;
  layers[1].rope_theta = static_cast<float>(ropes[1].theta);
  layers[1].rope_dim = ropes[1].r;
  layers[1].rope_interleaved = 1;
  config_.layer_configs = layers.data();
  config_.layer_count = config_.layers;
  const auto engine = make_engine(config_);
  const auto session = make_session(engine.get(), small_session());
  constexpr uint32_t kTokens = 200;
  const auto turned = [&](std::vector<float> keys, const Rope& rope) {
    for (size_t i = 0; i < keys.size() / static_cast<size_t>(shape_.d); ++i) {
      rope.turn(keys.data() + i * static_cast<size_t>(shape_.d),
                static_cast<int64_t>(i) / shape_.hkv);
    }
    return keys;
  };
  std::vector<float> plain[2], values[2];
  for (uint32_t l = 0; l < 2; ++l) {
    plain[l] = numbers_.many(shape_.kv(kTokens));
    values[l] = numbers_.many(shape_.kv(kTokens));
    const auto k = turned(plain[l], ropes[l]);
    const auto tk = tensor(k, {kTokens, shape_.hkv, shape_.d}),
               tv = tensor(values[l], {kTokens, shape_.hkv, shape_.d});
    ASSERT_OK(keyhole_session_append(session.get(), l, &tk, &tv, nullptr));
  }
  // Behind a sink; among the newest of the ring; before all that the ring has.
  for (const auto& [first, count] :
       std::vector<std::pair<uint32_t, uint32_t>>{{4, 50}, {135, 8}, {20, 30}}) {
    SCOPED_TRACE(std::to_string(first) + ", " + std::to_string(count));
    ASSERT_OK(keyhole_session_remove(session.get(), first, count, -static_cast<int32_t>(count)));
    Model model(config_);
    for (uint32_t l = 0; l < 2; ++l) {
      erase_rows(plain[l], shape_.kv(1), first, count);
      erase_rows(values[l], shape_.kv(1), first, count);
      const auto expected = turned(plain[l], ropes[l]);
      model.append(l, expected, values[l]);
      const uint32_t n = model.tokens(l), begin = l == 1 ? n - layers[1].window : 0;
      std::vector<float> rows(shape_.kv(n - begin));
      const auto all = tensor(rows, {n - begin, shape_.hkv, shape_.d});
      ASSERT_OK(keyhole_session_get_rows(session.get(), l, begin, &all, nullptr));
      for (size_t i = 0; i < rows.size(); ++i) {
        ASSERT_NEAR(expected[shape_.kv(begin) + i], rows[i], 2e-5) << "layer " << l << ", " << i;
      }
      auto q = numbers_.many(shape_.q(1));
      for (int64_t h = 0; h < shape_.hq; ++h) ropes[l].turn(q.data() + h * shape_.d, n);
      std::vector<double> lse;
      const auto o = model.attend_all(l, q, lse);
      expect_near(attend_only(session.get(), shape_, l, q), o, lse, 1e-3);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RemoveOf, WhatItCountedGoesOn) {
  config_.rope_theta = 10000.0F;
  const auto engine = make_engine(config_);
  auto sc = small_session();
  sc.index = "ivf:C=8,probe=8";
  sc.training_queries = 0;
  sc.audit_share = 1.0;
  const auto session = make_session(engine.get(), sc);
  Model model(config_);
  append(session.get(), model, 400);
  ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
  for (int i = 0; i < 5; ++i)
    (void)attend_only(session.get(), shape_, 0, numbers_.many(shape_.q(1)));
  const std::vector<int32_t> ids(400);
  ASSERT_OK(keyhole_session_set_identity(session.get(), "model", ids.data(), 400));
  const auto before = statistics(session.get());
  remove_both(session.get(), model, 390, 5);
  const auto after = statistics(session.get());
  EXPECT_EQ(before.attends, after.attends);
  EXPECT_EQ(before.keys_scored, after.keys_scored);
  EXPECT_EQ(before.build_seconds, after.build_seconds);
  EXPECT_LE(before.host_bytes_peak, after.host_bytes_peak);
  EXPECT_EQ(395U, after.tokens);
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  ASSERT_OK(keyhole_session_get_audit(session.get(), 0, KEYHOLE_ALL, &audit));
  EXPECT_EQ(5U * config_.q_heads, audit.audits);
  keyhole_identity identity;
  keyhole_identity_init(&identity);
  ASSERT_OK(keyhole_session_get_identity(session.get(), &identity));
  EXPECT_STREQ("model", identity.model);
  EXPECT_EQ(0U, identity.token_count);
  // The engine sees the session that is there now.
  keyhole_memory_use memory;
  keyhole_memory_use_init(&memory);
  ASSERT_OK(keyhole_engine_get_memory(engine.get(), &memory));
  EXPECT_EQ(1U, memory.sessions);
  EXPECT_EQ(after.index_bytes, memory.index_bytes);
}

TEST_F(RemoveOf, WhatFailsChangesNothing) {
  config_.rope_theta = 10000.0F;
  const auto engine = make_engine(config_);
  auto sc = small_session();
  const auto session = make_session(engine.get(), sc);
  Model model(config_);
  append(session.get(), model, 300);
  // f16 holds 65504, and the two components of a pair together point further.
  std::vector<float> k(shape_.kv(1), 0.0F), v = numbers_.many(shape_.kv(1));
  k[31] = k[63] = 60000.0F;  // a slow pair: turns by 1.3e-4 each
  const auto tk = tensor(k, {1, shape_.hkv, shape_.d}), tv = tensor(v, {1, shape_.hkv, shape_.d});
  for (uint32_t l = 0; l < config_.layers; ++l) {
    ASSERT_OK(keyhole_session_append(session.get(), l, &tk, &tv, nullptr));
    model.append(l, k, v);
  }
  EXPECT_EQ(KEYHOLE_NOT_FINITE, keyhole_session_remove(session.get(), 10, 20, 5000));
  const auto expect_unchanged = [&] {
    for (uint32_t l = 0; l < config_.layers; ++l) {
      std::vector<float> rows(shape_.kv(301));
      const auto all = tensor(rows, {301, shape_.hkv, shape_.d});
      ASSERT_OK(keyhole_session_get_rows(session.get(), l, 0, &all, nullptr));
      ASSERT_EQ(model.keys(l), rows);
    }
  };
  expect_unchanged();
  // Inside a step.
  const auto q = numbers_.many(shape_.q(1));
  std::vector<float> o(shape_.o(1));
  const auto tq = tensor(q, {shape_.hq, shape_.d}), out = tensor(o, {shape_.hq, shape_.d});
  ASSERT_OK(keyhole_session_attend_begin(session.get(), 0, &tq, nullptr, nullptr));
  EXPECT_EQ(KEYHOLE_BUSY, keyhole_session_remove(session.get(), 10, 20, 0));
  ASSERT_OK(keyhole_session_attend_end(session.get(), &out, nullptr));
  expect_unchanged();
  // Nothing to do.
  EXPECT_OK(keyhole_session_remove(session.get(), 10, 0, 0));
  EXPECT_OK(keyhole_session_remove(session.get(), 301, 5, 3));
  expect_unchanged();
}

TEST_F(RemoveOf, WhatCannotBeHadIsSaid) {
  const auto engine = make_engine(config_);
  const auto session = make_session(engine.get(), small_session());
  Model model(config_);
  append(session.get(), model, 30);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_remove(session.get(), 5, 3, -3));
  expect_error_text("shift is -3, and the engine knows of no RoPE");
  auto latent = config_;
  latent.rope_theta = 10000.0F;
  latent.value_dim = 48;
  latent.values_in_keys = 1;
  const auto other = make_engine(latent);
  const auto of_latents = make_session(other.get(), small_session());
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_remove(of_latents.get(), 5, 3, -3));
  expect_error_text("values_in_keys");
  StreamEngine device(small_engine());
  const auto streamed = make_session(device.handle.get(), small_session());
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_session_remove(streamed.get(), 5, 3, 0));
  expect_error_text("CUDA device");
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_remove(nullptr, 0, 0, 0));
}

}  // namespace
}  // namespace keyhole::test
