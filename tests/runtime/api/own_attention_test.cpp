// What engines with attention of their own call: the state of the offloaded tokens alone, of tokens that they have
// chosen, and the tokens that a search chooses, beside attention in double precision.
#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "tests/runtime/codes_fixture.h"
#include "tests/runtime/states_calls.h"

namespace keyhole::test {
namespace {

struct World {
  World(const keyhole_engine_config& engine_config, const keyhole_session_config& sc)
      : ec(engine_config), session(make_session(engine.get(), sc)) {}

  void prefill(uint32_t n) {
    for (uint32_t l = 0; l < ec.layers; ++l)
      prefill_both(session.get(), model, shape, l, n, numbers);
  }
  [[nodiscard]] std::vector<float> query() { return numbers.many(shape.q(1)); }

  keyhole_engine_config ec;
  EnginePtr engine = make_engine(ec);
  SessionPtr session;
  Numbers numbers{61};
  Model model{ec};
  Shape shape{ec};
};

TEST(AttendOffloaded, IsExactOverTheOffloadedTokensWhereTheBudgetReadsAll) {
  for (const keyhole_dtype dtype : {KEYHOLE_F32, KEYHOLE_F16, KEYHOLE_BF16}) {
    for (const uint32_t group : {1U, 3U, 16U, 71U}) {
      keyhole_engine_config ec = small_engine();
      ec.kv_dtype = dtype;
      ec.q_heads = ec.kv_heads * group;
      ec.softcap = group == 3 ? 20.0F : 0.0F;
      World w(ec, small_session());
      for (const uint32_t n : {3U, 20U, 60U, 200U, 45U}) {
        w.prefill(n);
        if (n == 200U) {
          ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
        }
        SCOPED_TRACE(std::to_string(w.model.tokens(0)) + " tokens");
        expect_offloaded_exact(w.session.get(), w.model, ec, 1, w.query());
      }
      ASSERT_OK(keyhole_session_set_mode(w.session.get(), KEYHOLE_MODE_EXACT, 0));
      expect_offloaded_exact(w.session.get(), w.model, ec, 1, w.query());
    }
  }
}

TEST(AttendOffloaded, WithSinkAndWindowItIsTheWholeStep) {
  // With every index type and tail this gives what a step reads beside sink and window, and nothing else.
  for (const char* spec : {"ivf:C=8,probe=2", "hnsw:M=8,ef=40", "roargraph:M=8,ef=8", "sparq:r=8",
                           "codes:k=2,v=2", "auto"}) {
    for (const keyhole_tail_mode tail : {KEYHOLE_TAIL_NONE, KEYHOLE_TAIL_SECOND}) {
      SCOPED_TRACE(spec);
      keyhole_session_config sc = small_session();
      sc.index = spec;
      keyhole_budget_init(&sc.budget);
      const bool coded = spec[0] == 'c' || spec[0] == 'a';
      if (!coded) {
        sc.budget.top_k = 9;
        sc.budget.tail = tail;
      }
      World w(small_engine(), sc);
      w.prefill(600);
      ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
      w.prefill(50);
      const auto q = w.query();
      const Answer all = attend_only(w.session.get(), w.shape, 0, q);
      const Answer offloaded = attend_offloaded(w.session.get(), w.shape, 0, q);
      const Answer resident = attend_tokens(w.session.get(), w.shape, 0, q, {}, {0, 0}, true);
      const float* os[] = {offloaded.o.data(), resident.o.data()};
      const float* lses[] = {offloaded.lse.data(), resident.lse.data()};
      Answer merged = all;
      ASSERT_OK(keyhole_merge_states(2, os, lses, w.ec.q_heads, w.ec.head_dim, KEYHOLE_LSE_NATURAL,
                                     merged.o.data(), merged.lse.data()));
      for (size_t i = 0; i < all.o.size(); ++i) ASSERT_NEAR(all.o[i], merged.o[i], 1e-5);
      for (size_t h = 0; h < all.lse.size(); ++h) ASSERT_NEAR(all.lse[h], merged.lse[h], 1e-5);
    }
  }
}

TEST(AttendOffloaded, OfNothingIsEmpty) {
  World w(small_engine(), small_session());
  const auto expect_empty = [&] {
    const Answer a = attend_offloaded(w.session.get(), w.shape, 1, w.query());
    for (const float x : a.o) ASSERT_EQ(x, 0.0F);
    for (const float x : a.lse) ASSERT_EQ(x, -INFINITY);
  };
  expect_empty();
  w.prefill(20);
  expect_empty();
  w.prefill(100);
  ASSERT_OK(keyhole_session_set_mode(w.session.get(), KEYHOLE_MODE_RESIDENT, 0));
  expect_empty();
}

TEST(AttendOffloaded, TakesPendingTokensIntoTheIndex) {
  World w(small_engine(), small_session());
  w.prefill(100);
  ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
  const uint32_t before = layer_tokens(w.session.get(), 0).indexed;
  for (int i = 0; i < 200; ++i) {
    w.prefill(1);
    for (uint32_t l = 0; l < w.ec.layers; ++l) {
      (void)attend_offloaded(w.session.get(), w.shape, l, w.query());
    }
  }
  EXPECT_GT(layer_tokens(w.session.get(), 0).indexed, before + 100);
  expect_offloaded_exact(w.session.get(), w.model, w.ec, 0, w.query());
}

class AttendTokens
    : public ::testing::TestWithParam<std::tuple<const char*, keyhole_dtype, uint32_t>> {
 protected:
  static keyhole_engine_config engine_config() {
    keyhole_engine_config ec = small_engine(3);
    ec.kv_dtype = std::get<1>(GetParam());
    ec.q_heads = ec.kv_heads * std::get<2>(GetParam());
    return ec;
  }
  static keyhole_session_config session_config() {
    keyhole_session_config sc = small_session();
    sc.index = std::get<0>(GetParam());
    if (std::string(sc.index).find("codes") == 0) keyhole_budget_init(&sc.budget);
    return sc;
  }
};

TEST_P(AttendTokens, AttendsWhatItIsTold) {
  World w(engine_config(), session_config());
  w.prefill(9);  // the sink, and a window
  for (int i = 0; i < 20; ++i) expect_tokens_exact(w.session.get(), w.model, w.ec, 0, w.numbers);
  w.prefill(unless_sanitized(2600, 1300));  // more than one chunk of rows
  ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
  w.prefill(50);
  for (uint32_t i = 0; i < unless_sanitized(20, 4); ++i) {
    expect_tokens_exact(w.session.get(), w.model, w.ec, i % 2, w.numbers);
  }
}

TEST_P(AttendTokens, FindsWhatThereIs) {
  World w(engine_config(), session_config());
  w.prefill(700);
  ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
  w.prefill(60);
  for (const uint32_t top_k : {1U, 7U, 100U, 4096U}) {
    expect_search_sound(w.session.get(), w.model, w.ec, 1, top_k, w.numbers);
  }
  ASSERT_OK(keyhole_session_set_mode(w.session.get(), KEYHOLE_MODE_EXACT, 0));
  EXPECT_EQ(expect_search_sound(w.session.get(), w.model, w.ec, 0, 50, w.numbers), 1.0);
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttendTokens,
                         ::testing::Values(std::make_tuple("flat", KEYHOLE_F16, 2U),
                                           std::make_tuple("ivf:C=8,probe=2,codec=int8",
                                                           KEYHOLE_F16, 48U),
                                           std::make_tuple("flat", KEYHOLE_F32, 5U),
                                           std::make_tuple("ivf:C=8,probe=2", KEYHOLE_BF16, 1U),
                                           std::make_tuple("roargraph:M=8,ef=30", KEYHOLE_F16, 4U),
                                           std::make_tuple("hnsw:M=8,ef=40", KEYHOLE_F32, 1U),
                                           std::make_tuple("sparq:r=8,codec=int8", KEYHOLE_F16, 3U),
                                           std::make_tuple("codes:k=2,v=2", KEYHOLE_BF16, 2U)),
                         [](const auto& p) {
                           const std::string spec = std::get<0>(p.param);
                           return spec.substr(0, spec.find(':')) + std::to_string(p.index);
                         });

TEST(SearchTokens, AFlatIndexFindsTheBest) {
  World w(small_engine(), small_session());
  w.prefill(500);
  ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
  w.prefill(40);
  for (const uint32_t top_k : {1U, 20U, 600U}) {
    EXPECT_EQ(expect_search_sound(w.session.get(), w.model, w.ec, 0, top_k, w.numbers), 1.0);
  }
}

TEST(SearchTokens, OfNothingIsEmpty) {
  World w(small_engine(), small_session());
  for (const uint32_t n : {0U, 20U}) {
    w.prefill(n);
    std::vector<uint32_t> ids(w.ec.q_heads * 5, 77), counts(w.ec.q_heads, 9);
    const auto q = w.query();
    const auto tq = tensor(q, {w.shape.hq, w.shape.d});
    ASSERT_OK(keyhole_session_search_tokens(w.session.get(), 0, &tq, 5, ids.data(), nullptr,
                                            counts.data()));
    EXPECT_EQ(counts, std::vector<uint32_t>(w.ec.q_heads, 0));
    EXPECT_EQ(ids, std::vector<uint32_t>(w.ec.q_heads * 5, 77));
  }
}

TEST(SearchTokens, WhatItChoosesIsWhatAStepAttends) {
  // Budget top_k of one query head: the step attends the union of the group, here of one.
  keyhole_engine_config ec = small_engine();
  ec.q_heads = ec.kv_heads;
  keyhole_session_config sc = small_session();
  sc.index = "ivf:C=8,probe=2";
  sc.budget.top_k = 12;
  World w(ec, sc);
  w.prefill(500);
  ASSERT_OK(keyhole_session_build(w.session.get(), nullptr, nullptr));
  ASSERT_EQ(layer_tokens(w.session.get(), 0).pending, 0U);
  const auto q = w.query();
  std::vector<uint32_t> ids(ec.q_heads * 12), counts(ec.q_heads);
  const auto tq = tensor(q, {w.shape.hq, w.shape.d});
  ASSERT_OK(keyhole_session_search_tokens(w.session.get(), 0, &tq, 12, ids.data(), nullptr,
                                          counts.data()));
  ASSERT_EQ(counts, std::vector<uint32_t>(ec.q_heads, 12));
  const Answer chosen = attend_tokens(w.session.get(), w.shape, 0, q, ids, counts, true);
  const Answer step = attend_only(w.session.get(), w.shape, 0, q);
  for (size_t i = 0; i < step.o.size(); ++i) ASSERT_NEAR(step.o[i], chosen.o[i], 1e-5);
  for (size_t h = 0; h < step.lse.size(); ++h) ASSERT_NEAR(step.lse[h], chosen.lse[h], 1e-5);
}

TEST(OwnAttention, RowsInInt8AreThoseOfTheStep) {
  keyhole_session_config sc = small_session();
  sc.kv_host = KEYHOLE_KV_HOST_INT8;
  sc.flush_block = 256;
  sc.mode = KEYHOLE_MODE_EXACT;
  World w(small_engine(), sc);
  w.prefill(900);
  const keyhole_layer_tokens t = layer_tokens(w.session.get(), 0);
  ASSERT_GT(t.pending, 500U);
  std::vector<uint32_t> one(t.pending), ids;
  std::iota(one.begin(), one.end(), t.sink);
  for (uint32_t h = 0; h < w.ec.kv_heads; ++h) ids.insert(ids.end(), one.begin(), one.end());
  const auto q = w.query();
  const Answer a = attend_offloaded(w.session.get(), w.shape, 0, q);
  const Answer b =
      attend_tokens(w.session.get(), w.shape, 0, q, ids, {t.pending, t.pending}, false);
  for (size_t i = 0; i < a.o.size(); ++i) ASSERT_NEAR(a.o[i], b.o[i], 1e-5);
  for (size_t h = 0; h < a.lse.size(); ++h) ASSERT_NEAR(a.lse[h], b.lse[h], 1e-5);
}

TEST(OwnAttention, OutputsAreOfAnyDtype) {
  World w(small_engine(), small_session());
  w.prefill(100);
  const auto q = w.query();
  const Answer a = attend_offloaded(w.session.get(), w.shape, 0, q);
  std::vector<uint16_t> half(w.shape.q(1));
  const int64_t shape[] = {w.shape.hq, w.shape.d};
  const auto tq = tensor(q, {w.shape.hq, w.shape.d});
  const keyhole_tensor out = keyhole_tensor_host(half.data(), KEYHOLE_BF16, 2, shape);
  ASSERT_OK(keyhole_session_attend_offloaded(w.session.get(), 0, &tq, &out, nullptr));
  for (size_t i = 0; i < half.size(); ++i) {
    const uint32_t bits = uint32_t{half[i]} << 16;
    float x = 0;
    std::memcpy(&x, &bits, sizeof x);
    ASSERT_NEAR(x, a.o[i], 0.02 + 0.01 * std::abs(a.o[i]));
  }
}

TEST(OwnAttention, ArgumentsAreNamed) {
  World w(small_engine(), small_session());
  w.prefill(100);
  keyhole_session* s = w.session.get();
  auto q = w.query();
  std::vector<float> o(q.size()), lse(w.ec.q_heads);
  const auto tq = tensor(q, {w.shape.hq, w.shape.d}), out = tensor(o, {w.shape.hq, w.shape.d});
  const auto refused = [](keyhole_status status, const char* text) {
    EXPECT_EQ(status, KEYHOLE_INVALID_ARGUMENT) << keyhole_last_error();
    expect_error_text(text);
  };
  const auto attend = [&](const std::vector<uint32_t>& ids, const std::vector<uint32_t>& counts) {
    return keyhole_session_attend_tokens(s, 0, &tq, ids.data(), counts.data(), 0, &out, lse.data());
  };
  refused(attend({5, 100, 3}, {2, 1}), "KV head 0: number 1 is 100, allowed: 0..99");
  refused(attend({5, 3, 4, 4}, {1, 3}), "KV head 1: 4 comes twice");
  ASSERT_OK(attend({5, 4, 3, 4}, {2, 2}));
  refused(keyhole_session_attend_tokens(s, 0, &tq, nullptr, nullptr, 0, &out, nullptr),
          "counts is NULL");
  const uint32_t counts[] = {0, 1};
  refused(keyhole_session_attend_tokens(s, 0, &tq, nullptr, counts, 0, &out, nullptr),
          "ids is NULL");
  refused(keyhole_session_attend_offloaded(s, 9, &tq, &out, nullptr), "layer is 9");
  refused(keyhole_session_attend_offloaded(s, 0, nullptr, &out, nullptr), "q is NULL");
  uint32_t id = 0, count[4];
  refused(keyhole_session_search_tokens(s, 0, &tq, 0, &id, nullptr, count), "top_k is 0");
  refused(keyhole_session_search_tokens(s, 0, &tq, 4097, &id, nullptr, count), "top_k is 4097");
  refused(keyhole_session_search_tokens(s, 0, &tq, 1, nullptr, nullptr, count), "ids is NULL");
  keyhole_tensor on_device = tq;
  on_device.memory = KEYHOLE_DEVICE;
  EXPECT_NE(keyhole_session_attend_offloaded(s, 0, &on_device, &out, nullptr), KEYHOLE_OK);
  // After refusals marks of ids are clean.
  std::vector<uint32_t> all(200);
  for (uint32_t i = 0; i < 200; ++i) all[i] = i % 100;
  ASSERT_OK(attend(all, {100, 100}));
  q[3] = NAN;
  EXPECT_EQ(keyhole_session_attend_offloaded(s, 0, &tq, &out, nullptr), KEYHOLE_NOT_FINITE);
  q[3] = 0.0F;
  ASSERT_OK(keyhole_session_attend_begin(s, 0, &tq, nullptr, nullptr));
  EXPECT_EQ(keyhole_session_attend_offloaded(s, 0, &tq, &out, nullptr), KEYHOLE_BUSY);
  EXPECT_EQ(attend({1}, {1, 0}), KEYHOLE_BUSY);
  ASSERT_OK(keyhole_session_attend_end(s, &out, nullptr));
}

/// On a device: resident tokens are read in the host's copy.
class OwnAttentionOnADevice : public StreamCodes {};

TEST_F(OwnAttentionOnADevice, ResidentTokensAreReadOnTheHost) {
  StreamEngine device(engine_config_);
  keyhole_session_config sc = small_session();
  const SessionPtr s = make_session(device.handle.get(), sc);
  Model model(engine_config_);
  StreamCodes::prefill(s.get(), model, 200);
  for (int i = 0; i < 30; ++i) step(s.get(), model, i % 2 == 1);
  for (int i = 0; i < 20; ++i) expect_tokens_exact(s.get(), model, engine_config_, 1, numbers_);
  expect_offloaded_exact(s.get(), model, engine_config_, 0,
                         numbers_.many(Shape(engine_config_).q(1)));
  expect_search_sound(s.get(), model, engine_config_, 0, 30, numbers_);
  for (int i = 0; i < 5; ++i) step(s.get(), model, false);
}

// Strided rows, of which nothing but the state changes; steps that are still under way come first.
TEST_F(OwnAttentionOnADevice, TakesAndGivesTensorsInDeviceMemory) {
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), small_session());
  Model model(engine_config_);
  StreamCodes::prefill(s.get(), model, 200);
  const Shape shape(engine_config_);
  const int64_t gap = 3, apart = shape.d + gap;
  const auto strided = [&](const std::vector<float>& rows) {
    keyhole_tensor t = on_device(rows, {shape.hq, shape.d});
    t.strides[0] = apart;
    return t;
  };
  for (int i = 0; i < 12; ++i) {
    const auto q = numbers_.many(shape.q(1));
    const auto heads = static_cast<size_t>(shape.hq), width = static_cast<size_t>(shape.d);
    std::vector<float> rows(heads * static_cast<size_t>(apart), NAN);
    for (size_t h = 0; h < heads; ++h) {
      std::copy_n(q.begin() + static_cast<ptrdiff_t>(h * width), width,
                  rows.begin() + static_cast<ptrdiff_t>(h * static_cast<size_t>(apart)));
    }
    std::vector<float> o(rows.size(), 77.0F), lse(heads, NAN);
    // q comes when the stream comes to it.
    const std::vector<float> late = rows;
    std::fill(rows.begin(), rows.end(), 0.0F);
    device.stream.push([&] { std::copy(late.begin(), late.end(), rows.begin()); });
    const keyhole_tensor tq = strided(rows), out = strided(o);
    const keyhole_layer_tokens t = layer_tokens(s.get(), 1);
    const bool offloaded = i % 2 == 0;
    std::vector<uint32_t> ids, counts(engine_config_.kv_heads, 2);
    for (uint32_t h = 0; h < engine_config_.kv_heads; ++h) ids.insert(ids.end(), {h, 50 + h});
    float* const sums = i % 3 == 0 ? nullptr : lse.data();
    if (offloaded) {
      ASSERT_OK(keyhole_session_attend_offloaded(s.get(), 1, &tq, &out, sums));
    } else {
      ASSERT_OK(
          keyhole_session_attend_tokens(s.get(), 1, &tq, ids.data(), counts.data(), 0, &out, sums));
    }
    const auto group = engine_config_.q_heads / engine_config_.kv_heads;
    for (uint32_t h = 0; h < heads; ++h) {
      std::vector<double> true_lse;
      const auto truth = model.attend(1, q, true_lse, [&](uint32_t token) {
        return offloaded ? is_offloaded(t, token) : token == h / group || token == 50 + h / group;
      });
      for (size_t j = 0; j < static_cast<size_t>(apart); ++j) {
        const float seen = o[h * static_cast<size_t>(apart) + j];
        ASSERT_NEAR(seen, j < width ? truth[h * width + j] : 77.0, 1e-4) << "head " << h;
      }
      if (sums != nullptr) {
        ASSERT_NEAR(lse[h], true_lse[h], 1e-4) << "head " << h;
      }
    }
    if (i % 3 == 2) step(s.get(), model, true);
  }
  // Both tensors are given, or none.
  std::vector<float> q(shape.q(1)), o(q.size());
  const auto here = tensor(q, {shape.hq, shape.d}), there = on_device(o, {shape.hq, shape.d});
  EXPECT_EQ(keyhole_session_attend_offloaded(s.get(), 1, &here, &there, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("allowed: both in the same");
  EXPECT_EQ(keyhole_session_attend_offloaded(s.get(), 1, &there, &here, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
  // Not of an engine on the host.
  const EnginePtr host = make_engine(engine_config_);
  const SessionPtr plain = make_session(host.get(), small_session());
  EXPECT_EQ(keyhole_session_attend_offloaded(plain.get(), 0, &there, &there, nullptr),
            KEYHOLE_UNSUPPORTED);
}

TEST_F(OwnAttentionOnADevice, CodesOnTheDeviceHaveNoStateOfTheirOwn) {
  StreamEngine device(engine_config_);
  const SessionPtr s = make_session(device.handle.get(), coded());
  Model model(engine_config_);
  StreamCodes::prefill(s.get(), model, 1000);
  const auto q = numbers_.many(Shape(engine_config_).q(1));
  std::vector<float> o(q.size());
  const auto tq = tensor(q, {hq(), d()}), out = tensor(o, {hq(), d()});
  EXPECT_EQ(keyhole_session_attend_offloaded(s.get(), 0, &tq, &out, nullptr), KEYHOLE_UNSUPPORTED);
  expect_error_text("KEYHOLE_PLACE_HOST");
  expect_tokens_exact(s.get(), model, engine_config_, 1, numbers_);
  EXPECT_EQ(expect_search_sound(s.get(), model, engine_config_, 0, 30, numbers_), 1.0);
  ASSERT_OK(keyhole_session_set_mode(s.get(), KEYHOLE_MODE_EXACT, 0));
  expect_offloaded_exact(s.get(), model, engine_config_, 0, q);
}

}  // namespace
}  // namespace keyhole::test
