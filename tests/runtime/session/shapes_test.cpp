// Layers of different shapes: what is refused, the plan, budgets of heads, audits, and the calls of engines with
// attention of their own.
#include <cmath>
#include <fstream>
#include <numeric>

#include "keyhole/attention.h"
#include "keyhole/batch.h"
#include "keyhole/index.h"
#include "keyhole/prefill.h"
#include "runtime/plan/config.h"
#include "tests/relative_error.h"
#include "tests/runtime/session/shapes_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

keyhole_status try_engine(const keyhole_engine_config& config) {
  keyhole_engine* engine = nullptr;
  const keyhole_status status = keyhole_engine_create(&config, &engine);
  keyhole_engine_destroy(engine);
  return status;
}

TEST(LayerShapes, WhatIsNotAllowedIsNamed) {
  const auto refused = [](uint32_t keyhole_layer_config::*field, uint32_t value,
                          const std::string& text) {
    ShapedConfig c(kHeads);
    c.layers[1].*field = value;
    expect_error(try_engine(c.engine), KEYHOLE_INVALID_ARGUMENT, text);
  };
  refused(&keyhole_layer_config::head_dim, 72,
          "layer_configs[1].head_dim is 72, allowed: multiples of 16 from 64 to 576");
  refused(&keyhole_layer_config::kv_heads, 3,
          "layer_configs[1].q_heads 8 with kv_heads 3: allowed are whole groups of 1..128");
  refused(&keyhole_layer_config::kv_heads, 4097,
          "layer_configs[1].kv_heads is 4097, allowed: 1..4096");
  refused(&keyhole_layer_config::q_heads, 129,
          "layer_configs[1].q_heads 129 with kv_heads 1: allowed are whole groups of 1..128");
  refused(&keyhole_layer_config::q_heads, 5000,
          "layer_configs[1].q_heads is 5000, allowed: 1..4096");
  refused(&keyhole_layer_config::rope_dim, 130,
          "layer_configs[1].rope_dim is 130, allowed: even numbers up to head_dim = 128");
  ShapedConfig narrow(kHeads);
  narrow.engine.head_dim = 128;
  narrow.engine.value_dim = 80;
  expect_error(try_engine(narrow.engine), KEYHOLE_INVALID_ARGUMENT,
               "layer_configs[0].head_dim is 64, allowed: at least value_dim = 80");
  ShapedConfig sinks(kHeads);
  std::vector<float> logits(20, 0.0F);
  logits[12] = NAN;
  sinks.engine.sink_logits = logits.data();
  expect_error(try_engine(sinks.engine), KEYHOLE_INVALID_ARGUMENT,
               "sink_logits of layer 2, head 0 is");
}

TEST(LayerShapes, NoughtIsTheEnginesAndIsReadBack) {
  ShapedConfig c({{4, 2, 64}, {4, 2, 64}});
  c.layers[0].q_heads = c.layers[0].kv_heads = c.layers[0].head_dim = 0;
  c.layers[1].head_dim = 256;
  c.layers[1].kv_heads = 0;
  const EnginePtr engine = make_engine(c.engine);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  EXPECT_EQ(seen.head_dim, 64U);
  EXPECT_EQ(seen.layer_configs[0].head_dim, 64U);
  EXPECT_EQ(seen.layer_configs[0].kv_heads, 2U);
  EXPECT_EQ(seen.layer_configs[0].q_heads, 4U);
  EXPECT_EQ(seen.layer_configs[1].head_dim, 256U);
  EXPECT_EQ(seen.layer_configs[1].kv_heads, 2U);
  EXPECT_FLOAT_EQ(seen.layer_configs[0].scale, 0.125F);
  EXPECT_FLOAT_EQ(seen.layer_configs[1].scale, 0.0625F);
  EXPECT_OK(try_engine(seen)) << "what is read back makes the same engine";
}

TEST(LayerShapes, StructsWithoutThemAreRead) {
  // As a caller of the version before has them.
  constexpr size_t kBefore = offsetof(keyhole_layer_config, head_dim);
  keyhole_engine_config ec = small_engine();
  std::vector<std::byte> bytes(2 * kBefore);
  for (size_t l = 0; l < 2; ++l) {
    keyhole_layer_config own;
    keyhole_layer_config_init(&own, &ec);
    own.struct_size = kBefore;
    own.window = l == 1 ? 7 : 0;
    std::copy_n(reinterpret_cast<const std::byte*>(&own), kBefore, bytes.data() + l * kBefore);
  }
  ec.layer_configs = reinterpret_cast<const keyhole_layer_config*>(bytes.data());
  ec.layer_count = 2;
  const EnginePtr engine = make_engine(ec);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  EXPECT_EQ(seen.layer_configs[1].window, 7U);
  EXPECT_EQ(seen.layer_configs[1].head_dim, 64U);
}

TEST(LayerShapes, ADeviceTakesLayersThatItHasKernelsFor) {
  const ShapedConfig c(kHeads);
  EXPECT_EQ(runtime::unsupported_on_device(runtime::check_model(c.engine)), "");
  // Alike, though not as the engine's fields say.
  const ShapedConfig alike({{8, 2, 128}, {8, 2, 128}});
  const runtime::ModelShape model = runtime::check_model(alike.engine);
  EXPECT_EQ(runtime::unsupported_on_device(model), "");
  EXPECT_FALSE(model.layers_differ());
  EXPECT_EQ(model.head_dim, 128U);
  EXPECT_TRUE(model.device_shapes().empty());

  const ShapedConfig wide({{8, 4, 256}, {8, 4, 256}, {8, 1, 512}});
  const runtime::ModelShape wide_model = runtime::check_model(wide.engine);
  EXPECT_EQ(runtime::unsupported_on_device(wide_model), "");
  const ShapedConfig wider({{8, 4, 256}, {8, 1, 576}});
  EXPECT_EQ(
      runtime::unsupported_on_device(runtime::check_model(wider.engine)),
      "layer 1: there are no GPU kernels for head_dim 576, allowed: 64, 80, 96, 128, 256, 512");
  const ShapedConfig many({{4, 2, 64}, {17, 1, 64}});
  EXPECT_EQ(runtime::unsupported_on_device(runtime::check_model(many.engine)),
            "layer 1: there are no GPU kernels for 17 query heads per KV head, allowed: 1..16");
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  keyhole_engine_config on_device = wider.engine;
  on_device.device = KEYHOLE_DEVICE_CUDA;
  expect_error(keyhole_plan(&on_device, nullptr, 1000, 0, 0, &plan), KEYHOLE_UNSUPPORTED,
               "layer 1: there are no GPU kernels for head_dim 576");
  keyhole_engine_config narrow = c.engine;
  narrow.device = KEYHOLE_DEVICE_CUDA;
  narrow.value_dim = 48;
  expect_error(keyhole_plan(&narrow, nullptr, 1000, 0, 0, &plan), KEYHOLE_UNSUPPORTED,
               "layer 0: there are no GPU kernels for values narrower than keys: value_dim 48, "
               "head_dim 64");
  keyhole_engine_config trained = c.engine;
  trained.classifiers = "/nowhere";
  expect_error(try_engine(trained), KEYHOLE_UNSUPPORTED,
               "/nowhere: classifiers are of models whose layers have the same heads");
}

/// The plan of a device for layers of these shapes; the last slides where it says so.
keyhole_memory_plan device_plan(const std::vector<Heads>& heads, const keyhole_session_config& sc,
                                uint32_t last_window = 0) {
  ShapedConfig c(heads);
  c.engine.device = KEYHOLE_DEVICE_CUDA;
  c.layers.back().window = last_window;
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  EXPECT_OK(keyhole_plan(&c.engine, &sc, 20000, 0, 0, &plan));
  return plan;
}

TEST(LayerShapes, ADevicesPlanIsThatOfItsShapesTogether) {
  const Heads a{4, 2, 64}, b{8, 1, 128};
  keyhole_session_config sc = small_session();
  const auto expect_sum = [&](const char* what) {
    SCOPED_TRACE(what);
    const keyhole_memory_plan mixed = device_plan({a, b, a, b, b}, sc),
                              of_a = device_plan({a, a}, sc), of_b = device_plan({b, b, b}, sc);
    EXPECT_EQ(mixed.device_bytes, of_a.device_bytes + of_b.device_bytes);
    EXPECT_EQ(mixed.code_bytes, of_a.code_bytes + of_b.code_bytes);
    EXPECT_EQ(mixed.pinned_bytes, of_a.pinned_bytes + of_b.pinned_bytes);
    EXPECT_EQ(mixed.pinned_kv_bytes, of_a.pinned_kv_bytes + of_b.pinned_kv_bytes);
    EXPECT_EQ(mixed.kv_bytes, of_a.kv_bytes + of_b.kv_bytes);
    EXPECT_EQ(mixed.code_layers, of_a.code_layers + of_b.code_layers);
  };
  expect_sum("flat");
  sc.budget.tail = KEYHOLE_TAIL_SECOND;
  sc.budget.attend = KEYHOLE_ATTEND_NONE;
  sc.budget.min_keys = 100;
  expect_sum("partitions");
  sc = small_session();
  sc.index = "codes:k=2,v=2";
  sc.flush_block = 256;
  sc.budget.top_k = 16;
  sc.budget.tail = KEYHOLE_TAIL_CODES;
  expect_sum("codes");
  EXPECT_EQ(device_plan({a, b}, sc).code_layers, 2U);
  sc.exact_rows_by = KEYHOLE_ROWS_BY_HOST;
  expect_sum("codes, rows by the host");
  // A sliding layer has a ring, and neither resident tokens nor codes.
  const uint64_t ring = device_plan({a, a}, sc, 100).device_bytes;
  EXPECT_EQ(device_plan({a, b}, sc, 100).code_layers, 1U);
  EXPECT_LT(device_plan({a, b}, sc, 100).device_bytes, device_plan({a, b}, sc).device_bytes);
  EXPECT_GT(ring, uint64_t{2} * 2 * 2 * 64 * 116);
}

TEST(LayerShapes, TensorsAreOfTheLayersShape) {
  const ShapedConfig c(kHeads);
  const EnginePtr engine = make_engine(c.engine);
  const SessionPtr s = make_session(engine.get(), small_session());
  const Shape other = c.shape(0);
  const std::vector<float> k(other.kv(3)), v(other.kv(3));
  const auto tk = tensor(k, {3, other.hkv, other.d}), tv = tensor(v, {3, other.hkv, other.d});
  ASSERT_OK(keyhole_session_append(s.get(), 0, &tk, &tv, nullptr));
  EXPECT_EQ(keyhole_session_append(s.get(), 1, &tk, &tv, nullptr), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(layer_tokens(s.get(), 1).total, 0U);
}

// ---- Memory ----------------------------------------------------------------------------------------

TEST(LayerShapes, ThePlanForeseesWhatASessionTakes) {
  ShapedConfig c(kHeads);
  c.layers[3].window = 100;
  const EnginePtr engine = make_engine(c.engine);
  keyhole_session_config sc = small_session();
  sc.index = "ivf:C=16,probe=4";
  sc.budget.top_k = 50;
  for (const keyhole_tail_mode tail : {KEYHOLE_TAIL_NONE, KEYHOLE_TAIL_SECOND}) {
    sc.budget.tail = tail;
    sc.audit_share = tail == KEYHOLE_TAIL_NONE ? 0.0 : 1.0;
    const SessionPtr s = make_session(engine.get(), sc);
    Numbers numbers(4);
    Model model(c.engine);
    fill(s.get(), model, c, 3000, numbers);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    keyhole_memory_plan plan;
    keyhole_memory_plan_init(&plan);
    ASSERT_OK(keyhole_plan(&c.engine, &sc, 3000, 0, 0, &plan));
    const keyhole_statistics st = statistics(s.get());
    // K and V in f16 of 2, 1 and 4 KV heads; of the sliding layer its window of 100 and 16 tokens behind it.
    const uint64_t token = 2 * 2 * (2 * 64 + 1 * 128 + 4 * 96);
    EXPECT_EQ(plan.kv_bytes, 3000 * token + uint64_t{2} * 2 * 2 * 64 * 116);
    EXPECT_EQ(plan.device_bytes, (4 + 16 + 8) * token);
    EXPECT_EQ(plan.device_bytes, st.device_bytes);
    const auto near = [](uint64_t seen, uint64_t held) {
      EXPECT_NEAR(static_cast<double>(seen), static_cast<double>(held),
                  0.15 * static_cast<double>(held));
    };
    near(plan.index_bytes, st.index_bytes);
    near(plan.host_bytes, st.host_bytes);
  }
}

TEST(LayerShapes, TheHostMemoryLimitIsOfTheLayersRows) {
  const ShapedConfig c({{4, 2, 64}, {4, 4, 576}});
  const EnginePtr engine = make_engine(c.engine);
  keyhole_session_config sc = small_session();
  sc.training_queries = 0;
  const SessionPtr bare = make_session(engine.get(), sc);
  const uint64_t wide = uint64_t{500} * 2 * 2 * 4 * 576;
  sc.host_memory_limit = statistics(bare.get()).host_bytes + wide - 1;
  const SessionPtr s = make_session(engine.get(), sc);
  Numbers numbers(5);
  Model model(c.engine);
  prefill_both(s.get(), model, c.shape(0), 0, 500, numbers);
  const Shape shape = c.shape(1);
  const auto k = numbers.many(shape.kv(500)), v = numbers.many(shape.kv(500));
  const auto tk = tensor(k, {500, shape.hkv, shape.d}), tv = tensor(v, {500, shape.hkv, shape.d});
  EXPECT_EQ(keyhole_session_append(s.get(), 1, &tk, &tv, nullptr), KEYHOLE_OUT_OF_MEMORY);
}

// ---- Heads -----------------------------------------------------------------------------------------

uint32_t top_k_of(keyhole_session* s, uint32_t layer, uint32_t kv_head) {
  keyhole_budget b;
  keyhole_budget_init(&b);
  EXPECT_OK(keyhole_session_get_budget(s, layer, kv_head, &b));
  return b.top_k;
}

TEST(LayerShapes, BudgetsAreOfTheHeadsThatThereAre) {
  const ShapedConfig c(kHeads);
  const EnginePtr engine = make_engine(c.engine);
  const SessionPtr s = make_session(engine.get(), small_session());
  keyhole_budget b;
  keyhole_budget_init(&b);
  b.top_k = 7;
  expect_error(keyhole_session_set_budget(s.get(), 1, 1, &b), KEYHOLE_INVALID_ARGUMENT,
               "kv_head is 1, allowed: 0..0 or KEYHOLE_ALL");
  expect_error(keyhole_session_set_budget(s.get(), KEYHOLE_ALL, 4, &b), KEYHOLE_INVALID_ARGUMENT,
               "kv_head is 4, allowed: 0..3 or KEYHOLE_ALL");
  ASSERT_OK(keyhole_session_set_budget(s.get(), KEYHOLE_ALL, 1, &b));
  for (uint32_t l = 0; l < 4; ++l) {
    for (uint32_t h = 0; h < kHeads[l].kv_heads; ++h) {
      EXPECT_EQ(top_k_of(s.get(), l, h), h == 1 ? 7U : 4096U) << l << ", " << h;
    }
  }
  b.top_k = 8;
  ASSERT_OK(keyhole_session_set_budget(s.get(), 2, 3, &b));
  EXPECT_EQ(top_k_of(s.get(), 2, 3), 8U);
  EXPECT_EQ(top_k_of(s.get(), 3, 0), 4096U);
}

TEST(LayerShapes, ABudgetsFileIsOfTheLargestShape) {
  const ShapedConfig c(kHeads);
  const EnginePtr engine = make_engine(c.engine);
  const TemporaryFolder folder;
  const std::string path = (folder / "budgets.json").string();
  keyhole_session_config sc = small_session();
  sc.budgets = path.c_str();
  const auto open = [&](const std::string& heads) {
    std::ofstream(path) << R"({"keyhole_budgets": 1, "model": {"layers": 4, "q_heads": 8,
                              "kv_heads": 4, "head_dim": 128}, "heads": [)" +
                               heads + "]}";
    keyhole_session* s = nullptr;
    const keyhole_status status = keyhole_session_create(engine.get(), &sc, &s);
    return std::pair(status, SessionPtr(s));
  };
  const auto [status, s] = open(R"({"layer": "all", "kv_head": 2, "top_k": 20},
                                   {"layer": 1, "kv_head": 0, "top_k": 30})");
  ASSERT_OK(status);
  EXPECT_EQ(top_k_of(s.get(), 2, 2), 20U);
  EXPECT_EQ(top_k_of(s.get(), 2, 3), 4096U);
  EXPECT_EQ(top_k_of(s.get(), 1, 0), 30U);
  expect_error(open(R"({"layer": 1, "kv_head": 2, "top_k": 20})").first, KEYHOLE_INVALID_ARGUMENT,
               "heads[0]: kv_head is 2, layer 1 has 0..0");
  // Patterns of prompts are of query heads.
  const auto prompt = [&](const std::string& heads) {
    (void)open(heads);
    keyhole_prompt* made = nullptr;
    const keyhole_status made_status =
        keyhole_prompt_create(engine.get(), ("budgets:" + path).c_str(), &made);
    keyhole_prompt_destroy(made);
    return made_status;
  };
  EXPECT_OK(prompt(R"({"layer": 1, "q_head": 7, "pattern": "sampled"},
                      {"layer": "all", "q_head": 6, "pattern": "sampled"})"));
  expect_error(prompt(R"({"layer": 0, "q_head": 4, "pattern": "sampled"})"),
               KEYHOLE_INVALID_ARGUMENT, "q_head is 4, layer 0 has 0..3");
}

/// Errors that audits find are those of the answers beside attention in double precision.
TEST(LayerShapes, AuditsAreOfTheLayersHeads) {
  ShapedConfig c(kHeads);
  std::vector<float> sinks(20, 1.0F);
  c.engine.sink_logits = sinks.data();
  const EnginePtr engine = make_engine(c.engine);
  for (const char* index : {"ivf:C=16,probe=1", "codes:k=2,v=2"}) {
    SCOPED_TRACE(index);
    keyhole_session_config sc = small_session();
    sc.index = index;
    sc.budget.top_k = 8;
    if (std::string(index).starts_with("codes")) sc.budget.tail = KEYHOLE_TAIL_CODES;
    sc.audit_share = 1.0;
    const SessionPtr s = make_session(engine.get(), sc);
    Model model(c.engine);
    Numbers numbers(7);
    fill(s.get(), model, c, 900, numbers);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (uint32_t l = 0; l < 4; ++l) {
      const Shape shape = c.shape(l);
      // Small queries: where logits spread far, codes have rows read exactly until nothing is amiss.
      auto q = numbers.many(shape.q(1));
      for (float& x : q) x /= 16.0F;
      const Answer a = attend_only(s.get(), shape, l, q);
      std::vector<double> lse;
      const auto o = model.attend_all(l, q, lse);
      double worst = 0.0;
      const size_t width = shape.o(1) / lse.size();
      for (size_t h = 0; h < static_cast<size_t>(shape.hq); ++h) {
        raise(worst, relative_error(&a.o[h * width], &o[h * width], width));
      }
      keyhole_audit audit;
      keyhole_audit_init(&audit);
      ASSERT_OK(keyhole_session_get_audit(s.get(), l, KEYHOLE_ALL, &audit));
      EXPECT_EQ(audit.audits, kHeads[l].q_heads);
      ASSERT_TRUE(std::isfinite(worst));  // the limit below grows with it
      EXPECT_NEAR(audit.error_max, worst, 1e-3 * worst + 1e-5) << "layer " << l;
      EXPECT_GT(worst, 1e-3) << "a search that finds everything tests nothing";
    }
  }
}

// ---- Engines with attention of their own ----------------------------------------------------------

TEST(LayerShapes, ChosenTokensAndSearchesAreOfTheLayersHeads) {
  const ShapedConfig c(kHeads);
  const EnginePtr engine = make_engine(c.engine);
  const SessionPtr s = make_session(engine.get(), small_session());
  Model model(c.engine);
  Numbers numbers(8);
  fill(s.get(), model, c, 200, numbers);
  ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
  constexpr uint32_t kTop = 5;
  for (uint32_t l = 0; l < 4; ++l) {
    const Shape shape = c.shape(l);
    const auto d = static_cast<size_t>(shape.d), hkv = static_cast<size_t>(shape.hkv),
               hq = static_cast<size_t>(shape.hq);
    const auto q = numbers.many(shape.q(1));
    const auto tq = tensor(q, {shape.hq, shape.d});
    std::vector<uint32_t> ids(hq * kTop), counts(hq);
    std::vector<float> scores(ids.size());
    ASSERT_OK(keyhole_session_search_tokens(s.get(), l, &tq, kTop, ids.data(), scores.data(),
                                            counts.data()));
    const auto t = layer_tokens(s.get(), l);
    for (size_t h = 0; h < hq; ++h) {
      std::vector<float> all;
      for (uint32_t token = t.sink; token < t.total - t.window; ++token) {
        const float* k = &model.keys(l)[(token * hkv + h / (hq / hkv)) * d];
        all.push_back(std::inner_product(k, k + d, &q[h * d], 0.0F));
      }
      std::sort(all.rbegin(), all.rend());
      ASSERT_EQ(counts[h], kTop);
      for (uint32_t i = 0; i < kTop; ++i) EXPECT_NEAR(scores[h * kTop + i], all[i], 1e-3);
    }
    // Of each KV head other tokens, as many as its number and two more.
    std::vector<uint32_t> chosen, of_head(hkv);
    for (size_t h = 0; h < hkv; ++h) {
      of_head[h] = static_cast<uint32_t>(h) + 2;
      for (uint32_t i = 0; i < of_head[h]; ++i) {
        chosen.push_back(static_cast<uint32_t>(h) * 11 + i * 17);
      }
    }
    Answer a{std::vector<float>(shape.q(1)), std::vector<float>(hq)};
    const auto out = tensor(a.o, {shape.hq, shape.d});
    ASSERT_OK(keyhole_session_attend_tokens(s.get(), l, &tq, chosen.data(), of_head.data(), 0, &out,
                                            a.lse.data()));
    const uint32_t* first = chosen.data();
    for (size_t kv = 0; kv < hkv; first += of_head[kv++]) {
      std::vector<double> lse;
      const auto o = model.attend(l, q, lse, [&](uint32_t token) {
        return std::count(first, first + of_head[kv], token) != 0;
      });
      for (size_t h = kv * (hq / hkv); h < (kv + 1) * (hq / hkv); ++h) {
        EXPECT_NEAR(a.lse[h], lse[h], 1e-4);
        for (size_t i = h * d; i < (h + 1) * d; ++i) ASSERT_NEAR(a.o[i], o[i], 1e-4);
      }
    }
  }
}

TEST(LayerShapes, APromptsAttentionIsOfTheLayersHeads) {
  ShapedConfig c(kHeads);
  c.layers[2].window = 30;
  const EnginePtr engine = make_engine(c.engine);
  keyhole_prompt* prompt = nullptr;
  ASSERT_OK(keyhole_prompt_create(engine.get(), "dense", &prompt));
  expect_error(keyhole_prompt_set_pattern(prompt, 0, 4, "dense"), KEYHOLE_INVALID_ARGUMENT,
               "q_head is 4, allowed: 0..3");
  EXPECT_OK(keyhole_prompt_set_pattern(prompt, KEYHOLE_ALL, 7, "dense"));
  Numbers numbers(9);
  for (uint32_t l = 0; l < 4; ++l) {
    const Shape shape = c.shape(l);
    NewTokens t = new_tokens(shape, 70, numbers);
    Model model(c.engine);
    model.append(l, t.k, t.v);
    const NewTensors x(t, shape, KEYHOLE_HOST);
    EXPECT_OK(
        keyhole_prompt_attend(prompt, l, &x.q, &x.k, &x.v, &x.out, t.answer.lse.data(), nullptr));
    expect_answers(model, shape, l, t);
  }
  keyhole_prompt_destroy(prompt);
}

TEST(LayerShapes, ExtendsByAPatternAreOfTheLayersHeads) {
  ShapedConfig c(kHeads);
  std::vector<float> sinks;
  for (const Heads& h : kHeads)
    sinks.insert(sinks.end(), h.q_heads, static_cast<float>(sinks.size()));
  c.engine.sink_logits = sinks.data();
  const EnginePtr engine = make_engine(c.engine);
  const SessionPtr s = make_session(engine.get(), small_session());
  ASSERT_OK(keyhole_session_set_extend_pattern(s.get(), "dense", 1));
  Numbers numbers(11);
  Model model(c.engine);
  fill(s.get(), model, c, 90, numbers);
  for (uint32_t l = 0; l < 4; ++l) {
    NewTokens t = new_tokens(c.shape(l), 40, numbers);
    ASSERT_OK(extend(s.get(), c.shape(l), l, t));
    model.append(l, t.k, t.v);
    expect_answers(model, c.shape(l), l, t);
  }
}

TEST(LayerShapes, AnIndexIsOfTheLayersHeads) {
  const ShapedConfig c(kHeads);
  const EnginePtr engine = make_engine(c.engine);
  keyhole_index* index = nullptr;
  expect_error(keyhole_index_create(engine.get(), "flat", 1, 1, &index), KEYHOLE_INVALID_ARGUMENT,
               "kv_head is 1");
  ASSERT_OK(keyhole_index_create(engine.get(), "flat", 1, 0, &index));
  Numbers numbers(10);
  const auto keys = numbers.many(size_t{100} * 128), narrow = numbers.many(size_t{100} * 64);
  const auto tk = tensor(keys, {100, 128}), tn = tensor(narrow, {100, 64});
  EXPECT_EQ(keyhole_index_build(index, &tn, nullptr, nullptr, nullptr, 0, nullptr, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
  EXPECT_OK(keyhole_index_build(index, &tk, nullptr, nullptr, nullptr, 0, nullptr, nullptr));
  keyhole_index_destroy(index);
}

}  // namespace
}  // namespace keyhole::test
