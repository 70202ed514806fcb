// Values narrower than keys: every call that takes values or gives outputs, beside attention in double precision.
// Random shapes go through the whole API in random_calls_test.cpp and extend_test.cpp.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "keyhole/index.h"
#include "keyhole/save.h"
#include "runtime/plan/config.h"
#include "tests/relative_error.h"
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

/// Multi-head latent attention as DeepSeek has it: one KV head, values in its keys.
keyhole_engine_config latent_engine() {
  auto ec = small_engine();
  ec.q_heads = unless_sanitized(128U, 17U);
  ec.kv_heads = 1;
  ec.head_dim = 576;
  ec.value_dim = 512;
  ec.values_in_keys = 1;
  ec.scale = 0.02F;
  return ec;
}

class ValueDim : public ::testing::Test {
 protected:
  void make(const keyhole_engine_config& ec, const keyhole_session_config& sc, uint32_t tokens) {
    ec_ = ec;
    engine_ = make_engine(ec);
    session_ = make_session(engine_.get(), sc);
    model_ = Model(ec);
    for (uint32_t l = 0; l < ec.layers; ++l) {
      prefill_both(session_.get(), model_, Shape(ec), l, tokens, numbers_);
    }
    ASSERT_OK(keyhole_session_build(session_.get(), nullptr, nullptr));
  }
  /// A step of layer 0; the largest |o - o*| / |o*| of its heads.
  double step_error() {
    const Shape shape(ec_);
    const auto k = numbers_.many(shape.kv(1));
    const auto v = shape.values_of(k, numbers_);
    const auto q = numbers_.many(shape.q(1));
    std::vector<float> o(shape.o(1));
    const auto tk = tensor(k, {shape.hkv, shape.d}), tv = tensor(v, {shape.hkv, shape.dv}),
               tq = tensor(q, {shape.hq, shape.d}), out = tensor(o, {shape.hq, shape.dv});
    EXPECT_OK(keyhole_session_attend(session_.get(), 0, &tq, &tk, shape.given(tv), &out, nullptr));
    model_.append(0, k, v);
    std::vector<double> lse;
    const auto truth = model_.attend_all(0, q, lse);
    const auto width = static_cast<size_t>(shape.dv);
    double worst = 0.0;
    for (size_t h = 0; h < ec_.q_heads; ++h) {
      raise(worst, relative_error(&o[h * width], &truth[h * width], width));
    }
    return worst;
  }

  keyhole_engine_config ec_ = small_engine();
  EnginePtr engine_;
  SessionPtr session_;
  Model model_{small_engine()};
  Numbers numbers_{21};
};

TEST_F(ValueDim, LatentAttentionByEveryIndexType) {
  for (const char* spec :
       {"flat", "ivf:C=4,probe=16777216", "hnsw:M=6,ef=100000,efc=20",
        "roargraph:M=8,ef=100000,Nq=10,beam=12", "sparq:r=576", "codes:k=4,v=4"}) {
    SCOPED_TRACE(spec);
    auto sc = small_session();
    sc.index = spec;
    sc.training_queries = 32;
    if (std::string(spec).find("codes") == 0) {
      sc.budget.tail = KEYHOLE_TAIL_CODES;
      sc.budget.top_k = 1024;  // all that there are
    }
    make(latent_engine(), sc, unless_sanitized(400, 60));
    ASSERT_FALSE(HasFatalFailure());
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      expect_exact(session_.get(), model_, Shape(ec_), l, numbers_);
    }
  }
}

// Codes spread errors over all components that rows have; those beyond value_dim are no part of the output, nor of what
// an audit finds.
TEST_F(ValueDim, AuditsAreOfTheComponentsThatValuesHave) {
  auto ec = small_engine();
  ec.head_dim = 128;
  ec.value_dim = 16;
  auto sc = small_session();
  sc.index = "codes:k=4,v=2";
  sc.budget.tail = KEYHOLE_TAIL_CODES;
  sc.budget.top_k = 1;
  sc.audit_share = 1.0;
  make(ec, sc, 900);
  const double error = step_error();
  keyhole_audit audit;
  keyhole_audit_init(&audit);
  ASSERT_OK(keyhole_session_get_audit(session_.get(), 0, KEYHOLE_ALL, &audit));
  ASSERT_EQ(audit.audits, ec.q_heads);
  ASSERT_TRUE(std::isfinite(error));  // the limit below grows with it
  EXPECT_GT(error, 1e-3);
  EXPECT_NEAR(audit.error_max, error, 1e-3 * error);
}

TEST_F(ValueDim, TargetsAreMet) {
  auto ec = small_engine();
  ec.head_dim = 96;
  ec.value_dim = 32;
  auto sc = small_session();
  sc.budget.top_k = 4;
  sc.budget.tail = KEYHOLE_TAIL_SECOND;
  sc.budget.error_target = 0.02F;
  make(ec, sc, 800);
  EXPECT_LT(step_error(), 0.03);
  EXPECT_GT(statistics(session_.get()).keys_opened, 0U);
}

// The index API by itself: o has the width value_dim, and so have states that others made.
TEST_F(ValueDim, AnIndexByItself) {
  for (const bool in_keys : {false, true}) {
    for (const char* spec : {"flat", "codes:k=4,v=4"}) {
      SCOPED_TRACE(std::string(spec) + (in_keys ? ", values in keys" : ""));
      auto ec = small_engine();
      ec.head_dim = 80;
      ec.value_dim = 48;
      ec.values_in_keys = in_keys ? 1 : 0;
      ec.kv_heads = ec.q_heads = 1;
      const EnginePtr engine = make_engine(ec);
      const Shape shape(ec);
      Model model(ec), others(ec), all(ec);
      const uint32_t n = 300, g = 3;
      const auto keys = numbers_.many(shape.kv(n));
      const auto values = shape.values_of(keys, numbers_);
      const auto queries = numbers_.many(shape.q(g));
      model.append(0, keys, values);
      const auto tk = tensor(keys, {n, shape.d}), tv = tensor(values, {n, shape.dv}),
                 tq = tensor(queries, {g, shape.d});
      keyhole_index* index = nullptr;
      ASSERT_OK(keyhole_index_create(engine.get(), spec, 0, 0, &index));
      ASSERT_OK(
          keyhole_index_build(index, &tk, shape.given(tv), nullptr, nullptr, 0, nullptr, nullptr));
      keyhole_search_options options;
      keyhole_search_options_init(&options);
      options.budget.top_k = n;
      if (std::string(spec) != "flat") options.budget.tail = KEYHOLE_TAIL_CODES;
      std::vector<float> o(shape.o(g) + 1, 77.0F), lse(g);
      ASSERT_OK(keyhole_index_attend(index, &tq, &options, o.data(), lse.data(), nullptr, nullptr,
                                     nullptr));
      EXPECT_EQ(o.back(), 77.0F) << "no more is written than value_dim";
      for (uint32_t h = 0; h < g; ++h) {
        const auto q =
            std::vector<float>(queries.begin() + h * shape.d, queries.begin() + (h + 1) * shape.d);
        std::vector<double> true_lse;
        const auto truth = model.attend_all(0, q, true_lse);
        expect_near({{o.begin() + h * shape.dv, o.begin() + (h + 1) * shape.dv}, {lse[h]}}, truth,
                    true_lse, 1e-3);
      }
      keyhole_index_destroy(index);
    }
  }
}

// What others attend to is a state of value_dim components: a target that they meet alone opens nothing.
TEST_F(ValueDim, StatesOfOthersInAnIndexByItself) {
  auto ec = small_engine();
  ec.head_dim = 64;
  ec.value_dim = 16;
  const EnginePtr engine = make_engine(ec);
  const uint32_t n = 400, g = 2;
  const auto keys = numbers_.many(size_t{n} * 64), values = numbers_.many(size_t{n} * 16),
             queries = numbers_.many(size_t{g} * 64);
  const auto tk = tensor(keys, {n, 64}), tv = tensor(values, {n, 16}),
             tq = tensor(queries, {g, 64});
  keyhole_index* index = nullptr;
  ASSERT_OK(keyhole_index_create(engine.get(), "flat", 0, 0, &index));
  ASSERT_OK(keyhole_index_build(index, &tk, &tv, nullptr, nullptr, 0, nullptr, nullptr));
  ASSERT_OK(keyhole_index_build_tail(index, 16, nullptr, nullptr));
  std::vector<float> o(size_t{g} * 16), lse(g);
  // As long as it may be and no longer: a sanitizer sees a read of head_dim components.
  const std::vector<float> other_o(size_t{g} * 16, 1.0F);
  const auto opened = [&](float other_lse) {
    const std::vector<float> others(g, other_lse);
    keyhole_search_options options;
    keyhole_search_options_init(&options);
    options.budget.top_k = 1;
    options.budget.error_target = 0.01F;
    options.other_o = other_o.data();
    options.other_lse = others.data();
    keyhole_search_cost cost;
    keyhole_search_cost_init(&cost);
    EXPECT_OK(
        keyhole_index_attend(index, &tq, &options, o.data(), lse.data(), nullptr, nullptr, &cost));
    return cost.keys_opened;
  };
  EXPECT_EQ(opened(60.0F), 0U);
  EXPECT_GT(opened(-60.0F), 0U);
  keyhole_index_destroy(index);
}

TEST_F(ValueDim, IsReadBackAndPartOfASavedSessionsShape) {
  auto ec = small_engine();
  ec.value_dim = 32;
  make(ec, small_session(), 50);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine_.get(), &seen));
  EXPECT_EQ(seen.value_dim, 32U);
  const std::string path = ::testing::TempDir() + "keyhole_value_dim.bin";
  ASSERT_OK(keyhole_session_save(session_.get(), path.c_str()));
  ec.value_dim = 48;
  const EnginePtr other = make_engine(ec);
  keyhole_session* loaded = nullptr;
  EXPECT_EQ(keyhole_session_load(other.get(), path.c_str(), nullptr, &loaded),
            KEYHOLE_INVALID_ARGUMENT);
  expect_error_text("value_dim 32, the engine has 48");
  (void)std::remove(path.c_str());
}

void expect_refused(keyhole_status status, const std::string& text) {
  EXPECT_EQ(status, KEYHOLE_INVALID_ARGUMENT);
  expect_error_text(text);
}

TEST_F(ValueDim, WhatIsNotAllowedIsRefused) {
  const auto refused = [](uint32_t value_dim, int32_t in_keys, const char* text) {
    auto ec = small_engine();
    ec.value_dim = value_dim;
    ec.values_in_keys = in_keys;
    keyhole_engine* engine = nullptr;
    expect_refused(keyhole_engine_create(&ec, &engine), text);
  };
  refused(40, 0, "value_dim is 40, allowed: multiples of 16 up to head_dim = 64");
  refused(80, 0, "value_dim is 80, allowed: multiples of 16 up to head_dim = 64");
  refused(32, 2, "values_in_keys is 2, allowed: 0..1");

  auto ec = small_engine();
  ec.value_dim = 32;
  make(ec, small_session(), 20);
  const Shape shape(ec);
  const auto rows = numbers_.many(shape.kv(1)), q = numbers_.many(shape.q(1));
  std::vector<float> o(shape.q(1));
  const auto wide = tensor(rows, {2, 64}), narrow = tensor(rows, {2, 32}), tq = tensor(q, {4, 64}),
             out = tensor(o, {4, 32}), wide_out = tensor(o, {4, 64});
  keyhole_session* const s = session_.get();
  expect_refused(keyhole_session_attend(s, 0, &tq, &wide, &wide, &out, nullptr),
                 "tensor v has shape [2, 64], needed: [2, 32]");
  expect_refused(keyhole_session_attend(s, 0, &tq, &wide, &narrow, &wide_out, nullptr),
                 "tensor out has shape [4, 64], needed: [4, 32]");
  expect_refused(keyhole_session_attend(s, 0, &tq, &wide, nullptr, &out, nullptr),
                 "k and v: one is NULL");
  EXPECT_EQ(layer_tokens(s, 0).total, 20U);

  ec.values_in_keys = 1;
  make(ec, small_session(), 20);
  expect_refused(keyhole_session_attend(session_.get(), 0, &tq, &wide, &narrow, &out, nullptr),
                 "tensor v is given, but the engine was made with values_in_keys");
  expect_refused(keyhole_session_attend(session_.get(), 0, &tq, nullptr, &narrow, &out, nullptr),
                 "k and v: one is NULL");
  const keyhole_tensor one_k = tensor(rows, {1, 2, 64}), one_v = tensor(rows, {1, 2, 32});
  expect_refused(keyhole_session_append(session_.get(), 0, &one_k, &one_v, nullptr),
                 "tensor v is given");
  EXPECT_EQ(layer_tokens(session_.get(), 0).total, 20U);
}

// NaN behind the components that are taken for values are the keys' to tell; a NaN in a value has the value's name.
TEST_F(ValueDim, WhatIsNotFiniteIsNamed) {
  auto ec = small_engine();
  ec.value_dim = 32;
  make(ec, small_session(), 20);
  auto k = numbers_.many(128), v = numbers_.many(64), q = numbers_.many(256);
  std::vector<float> o(128);
  const auto tk = tensor(k, {2, 64}), tv = tensor(v, {2, 32}), tq = tensor(q, {4, 64}),
             out = tensor(o, {4, 32});
  v[63] = NAN;
  EXPECT_EQ(keyhole_session_attend(session_.get(), 0, &tq, &tk, &tv, &out, nullptr),
            KEYHOLE_NOT_FINITE);
  expect_error_text("tensor v");
}

TEST(ValueDimDevice, TakesTheHostAndSaysWhy) {
  auto ec = small_engine();
  ec.device = KEYHOLE_DEVICE_AUTO;
  ec.value_dim = 32;
  const std::string why = runtime::unsupported_on_device(runtime::check_model(ec));
  EXPECT_NE(why.find("value_dim 32"), std::string::npos) << why;
  EXPECT_NE(why.find("head_dim 64"), std::string::npos) << why;
  ec.value_dim = 64;
  EXPECT_EQ(runtime::unsupported_on_device(runtime::check_model(ec)), "");
  ec.value_dim = 32;
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  ASSERT_OK(keyhole_plan(&ec, nullptr, 4096, 0, 0, &plan));
  EXPECT_EQ(plan.pinned_bytes, 0U);
  ec.device = KEYHOLE_DEVICE_CUDA;
  EXPECT_EQ(keyhole_plan(&ec, nullptr, 4096, 0, 0, &plan), KEYHOLE_UNSUPPORTED);
  expect_error_text("value_dim 32");
}

}  // namespace
}  // namespace keyhole::test
