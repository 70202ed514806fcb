// What "auto" stands for: on a device the most bits that its memory has room for.
#include <cstring>

#include "gpu/codes.h"
#include "keyhole/index.h"
#include "tests/runtime/stream_fixture.h"

namespace keyhole::test {
namespace {

class AutoIndex : public StreamTest {
 protected:
  static std::string index_of(keyhole_session* s) {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    EXPECT_OK(keyhole_session_get_config(s, &c));
    return c.index;
  }
  static keyhole_budget budget_of(keyhole_session* s) {
    keyhole_session_config c;
    keyhole_session_config_init(&c);
    EXPECT_OK(keyhole_session_get_config(s, &c));
    return c.budget;
  }
  /// Bytes of resident tokens and codes of so many bits.
  static size_t bytes_with(uint32_t bits, const keyhole_session_config& c) {
    const gpu::ResidentShape resident{2,        4, 2, 64, DType::f16, c.sink, c.window + 256,
                                      c.window, {}};
    gpu::CodesShape shape{2, 4, 2, {64, bits, bits}, DType::f16, 0, gpu::kMostDeviceRows, {}};
    shape.blocks = (c.max_tokens - c.sink - c.window) / kCodeBlock;
    return gpu::cuda_resident_bytes(resident) + gpu::codes_bytes(shape);
  }
};

TEST_F(AutoIndex, IsTheDefault) {
  EnginePtr host = make_engine(engine_config_);
  SessionPtr s;
  keyhole_session* made = nullptr;
  ASSERT_OK(keyhole_session_create(host.get(), nullptr, &made));
  s.reset(made);
  EXPECT_EQ(index_of(s.get()), "codes:k=4,v=4,lists=64,from=8192");
  EXPECT_EQ(budget_of(s.get()).tail, KEYHOLE_TAIL_CODES);
  EXPECT_EQ(budget_of(s.get()).top_k, 16U);
}

TEST_F(AutoIndex, WhatUndoesRopeIsRefusedWhereTheEngineKnowsOfNone) {
  EnginePtr host = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.index = "ivf:C=4,rope=undo";
  keyhole_session* made = nullptr;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_create(host.get(), &c, &made));
  expect_error_text("undoes RoPE, and the engine knows of none: rope_theta is 0");
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&engine_config_, &c, 1000, 0, 0, &plan));
  keyhole_index* index = nullptr;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_index_create(host.get(), c.index, 0, 0, &index));
  c.index = "ivf:C=4,rope=keep";
  SessionPtr s = make_session(host.get(), c);
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_session_set_index(s.get(), "ivf:rope=undo"));
  EXPECT_EQ(index_of(s.get()), c.index);
  EXPECT_OK(keyhole_session_set_index(s.get(), "saap:partitions=own,classifier=off"));
  // One layer with RoPE is enough: models have layers without.
  std::vector<keyhole_layer_config> layers(engine_config_.layers);
  for (auto& layer : layers) keyhole_layer_config_init(&layer, &engine_config_);
  layers[1].rope_theta = 10000.0F;
  engine_config_.layer_configs = layers.data();
  engine_config_.layer_count = engine_config_.layers;
  EnginePtr some = make_engine(engine_config_);
  c.index = "ivf:C=4,rope=undo";
  s = make_session(some.get(), c);
  EXPECT_EQ(index_of(s.get()), c.index);
}

TEST_F(AutoIndex, ExactIsAModeOfItsOwn) {
  EnginePtr host = make_engine(engine_config_);
  keyhole_session_config c = small_session();
  c.index = "exact";
  SessionPtr s = make_session(host.get(), c);
  const auto mode_of = [](keyhole_session* session) {
    keyhole_session_config now;
    keyhole_session_config_init(&now);
    EXPECT_OK(keyhole_session_get_config(session, &now));
    return now.mode;
  };
  EXPECT_EQ(index_of(s.get()), "flat");
  EXPECT_EQ(mode_of(s.get()), KEYHOLE_MODE_EXACT);
  // Nothing is built, and all tokens are attended though a step's budget is one of them.
  c.index = "ivf:C=4,probe=1";
  c.budget.top_k = 1;
  SessionPtr later = make_session(host.get(), c);
  Model model(engine_config_);
  const Shape shape(engine_config_);
  prefill_both(later.get(), model, shape, 0, 600, numbers_);
  ASSERT_OK(keyhole_session_set_index(later.get(), "exact"));
  EXPECT_EQ(mode_of(later.get()), KEYHOLE_MODE_EXACT);
  expect_exact(later.get(), model, shape, 0, numbers_);
  // With a mode that reads no offloaded tokens it makes no sense.
  c.index = "exact";
  c.mode = KEYHOLE_MODE_RESIDENT;
  keyhole_session* none = nullptr;
  EXPECT_EQ(keyhole_session_create(host.get(), &c, &none), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(keyhole_last_error()).find("index is \"exact\""), std::string::npos)
      << keyhole_last_error();
  // An unknown one is refused with all that there are.
  EXPECT_EQ(keyhole_session_set_index(s.get(), "all"), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(keyhole_last_error()).find("codes, auto, exact"), std::string::npos)
      << keyhole_last_error();
}

TEST_F(AutoIndex, TakesTheMostBitsThatTheDeviceHasRoomFor) {
  StreamEngine device(engine_config_);
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = 20000;
  for (const uint32_t bits : {4U, 2U}) {
    c.device_memory_limit = bytes_with(bits, c);
    SessionPtr fits = make_session(device.handle.get(), c);
    EXPECT_EQ(index_of(fits.get()),
              "codes:k=" + std::to_string(bits) + ",v=" + std::to_string(bits));
    c.device_memory_limit -= 1;
    SessionPtr less = make_session(device.handle.get(), c);
    // With room for one layer of two, fewer bits bring no other there.
    EXPECT_EQ(index_of(less.get()), bits == 4 ? "codes:k=2,v=2" : "codes:k=4,v=4");
    EXPECT_EQ(statistics(less.get()).code_layers, bits == 4 ? 2U : 1U);
  }
  // Without room for any it is the host's.
  c.device_memory_limit = bytes_with(2, c) / 2;
  SessionPtr none = make_session(device.handle.get(), c);
  EXPECT_EQ(index_of(none.get()), "codes:k=4,v=4,lists=64,from=8192");
  EXPECT_EQ(statistics(none.get()).code_layers, 0U);
}

TEST_F(AutoIndex, IsChosenWhereASessionIsGivenItLater) {
  StreamEngine device(engine_config_);
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = 20000;
  c.index = "flat";
  c.device_memory_limit = bytes_with(2, c);
  SessionPtr s = make_session(device.handle.get(), c);
  prefill(s.get(), 1500, 3);
  ASSERT_OK(keyhole_session_set_index(s.get(), "auto"));
  EXPECT_EQ(index_of(s.get()), "codes:k=2,v=2");
  EXPECT_EQ(layer_tokens(s.get(), 0).pending, 0U);
  EXPECT_EQ(keyhole_session_set_index(s.get(), "automatic"), KEYHOLE_INVALID_ARGUMENT);
  // The codes that are there make way, and leave no more room than before.
  ASSERT_OK(keyhole_session_set_index(s.get(), "auto"));
  EXPECT_EQ(index_of(s.get()), "codes:k=2,v=2");
  EXPECT_EQ(statistics(s.get()).code_layers, 2U);
}

TEST_F(AutoIndex, GivenLaterItLeadsToTheBudgetOfAConfigThatHasIt) {
  StreamEngine device(engine_config_);
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = 20000;
  std::vector<keyhole_budget> budgets(5, c.budget);
  budgets[1].top_k = 50;
  budgets[2].attend = KEYHOLE_ATTEND_NONE;
  budgets[2].tail = KEYHOLE_TAIL_SECOND;  // partitions: not for codes
  budgets[3].top_k = 7;
  budgets[3].min_weight = 0.01F;
  budgets[4].error_target = 0.1F;
  for (const keyhole_budget& budget : budgets) {
    c.budget = budget;
    c.index = "auto";
    SessionPtr made = make_session(device.handle.get(), c);
    c.index = "flat";
    SessionPtr later = make_session(device.handle.get(), c);
    ASSERT_OK(keyhole_session_set_index(later.get(), "auto"));
    EXPECT_EQ(index_of(made.get()), index_of(later.get()));
    const keyhole_budget a = budget_of(made.get()), b = budget_of(later.get());
    EXPECT_EQ(std::memcmp(&a, &b, sizeof a), 0)
        << "tail " << a.tail << " and " << b.tail << ", top_k " << a.top_k << " and " << b.top_k;
    for (uint32_t h = 0; h < engine_config_.kv_heads; ++h) {
      keyhole_budget head;
      keyhole_budget_init(&head);
      ASSERT_OK(keyhole_session_get_budget(later.get(), 1, h, &head));
      EXPECT_EQ(std::memcmp(&a, &head, sizeof a), 0) << "KV head " << h;
    }
    // Nothing is left to do for a session that has it.
    ASSERT_OK(keyhole_session_set_index(made.get(), "auto"));
    const keyhole_budget again = budget_of(made.get());
    EXPECT_EQ(std::memcmp(&a, &again, sizeof a), 0);
  }
}

TEST_F(AutoIndex, IsPlanned) {
  keyhole_engine_config e = engine_config_;
  e.layers = 32;
  e.q_heads = 32;
  e.kv_heads = 8;
  e.head_dim = 128;
  e.device = KEYHOLE_DEVICE_CUDA;
  keyhole_memory_plan plan;
  keyhole_memory_plan_init(&plan);
  ASSERT_OK(keyhole_plan(&e, nullptr, 131072, size_t{8} << 30, 0, &plan));
  EXPECT_STREQ(plan.index, "codes:k=4,v=4");
  EXPECT_GT(plan.code_bytes, size_t{4} << 30);
  EXPECT_LT(plan.code_bytes, size_t{5} << 30);
  EXPECT_EQ(plan.index_bytes, 0U);
  EXPECT_LE(plan.device_bytes, size_t{8} << 30);
  EXPECT_EQ(plan.pinned_kv_bytes, uint64_t{131072 - 640} / 256 * 256 * 2 * 32 * 8 * 128 * 2);
  EXPECT_EQ(plan.code_layers, 32U);
  ASSERT_OK(keyhole_plan(&e, nullptr, 131072, size_t{4} << 30, 0, &plan));
  EXPECT_STREQ(plan.index, "codes:k=2,v=2");
  EXPECT_EQ(plan.fits, 1U);
}

}  // namespace
}  // namespace keyhole::test
