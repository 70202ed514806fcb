// Where lists of codes on a device are worth their memory.
#include "runtime/plan/list_gain.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/device.h"
#include "index/types/factory.h"
#include "runtime/engine/engine.h"
#include "runtime/plan/auto_index.h"
#include "tests/runtime/fixture.h"

namespace keyhole::runtime {
namespace {

constexpr uint64_t kTokens = 131072;

LayerShape heads_of(uint32_t q_heads, uint32_t kv_heads, uint32_t dim) {
  return {q_heads, kv_heads, dim, dim};
}

TEST(ListGain, GrowsWithTheBytesOfALayersCodes) {
  const LayerShape usual = heads_of(32, 8, 128);
  const uint64_t four = rows_for_lists(usual, {128, 4, 4}),
                 two = rows_for_lists(usual, {128, 2, 2});
  EXPECT_GE(four, gpu::kListsFrom);
  EXPECT_LE(four, kTokens) << "at 128k they save a third of a step";
  EXPECT_GT(two, four) << "all codes of 2 bits are read sooner";
  EXPECT_GT(rows_for_lists(heads_of(32, 4, 128), {128, 4, 4}), four);
  EXPECT_LE(rows_for_lists(heads_of(64, 16, 128), {128, 4, 4}), four);
  EXPECT_GT(rows_for_lists(heads_of(16, 2, 256), {256, 4, 4}), 2 * kTokens)
      << "few KV heads choose for long";
  EXPECT_EQ(rows_for_lists(heads_of(32, 1, 64), {64, 2, 2}), 0U) << "and one gains nothing by it";
  EXPECT_EQ(rows_for_lists(heads_of(32, 8, 512), {512, 4, 4}), 0U) << "a device has none there";
}

class ListGainOfAModel : public testing::Test {
 protected:
  static keyhole_engine_config config() {
    keyhole_engine_config c = test::small_engine(1);
    c.layers = 3;
    c.q_heads = 32;
    c.kv_heads = 8;
    c.head_dim = 128;
    return c;
  }
  [[nodiscard]] CodePlan plan() const {
    CodePlan plan;
    plan.shape = {128, 4, 4};
    plan.exact_rows = 16;
    plan.layers.assign(model_.layers, 1);
    return plan;
  }
  [[nodiscard]] bool gains(const CodePlan& plan, uint64_t room, uint64_t tokens = kTokens) const {
    return gains_by_lists(plan, lists_, {room, UINT64_MAX}, tokens, params_, model_);
  }
  [[nodiscard]] CodePlan listed() const {
    CodePlan with = plan();
    with.lists = lists_;
    return with;
  }

  const Engine engine_{config()};
  const ModelShape& model_ = engine_.model();
  const SessionParams params_{};
  const index::CodeListing lists_ = index::code_listing("codes:k=4,v=4,lists=64");
};

TEST_F(ListGainOfAModel, WantsMoreRowsThanCodesAreReadInAndRoom) {
  EXPECT_TRUE(gains(plan(), UINT64_MAX));
  EXPECT_FALSE(gains(plan(), UINT64_MAX, 32768)) << "all codes are as fast";
  const uint64_t bytes = code_bytes(listed(), kTokens, params_, model_).device;
  EXPECT_GT(bytes, code_bytes(plan(), kTokens, params_, model_).device);
  EXPECT_TRUE(gains(plan(), 2 * bytes));
  EXPECT_FALSE(gains(plan(), 2 * bytes - 1)) << "half of the room is for others";
  CodePlan by_host = plan();
  by_host.rows_by_host = true;
  EXPECT_FALSE(gains(by_host, UINT64_MAX))
      << "a device does not choose among rows that a host reads";
  CodePlan some = plan();
  some.layers[0] = 0;
  EXPECT_FALSE(gains(some, UINT64_MAX)) << "the first layer found no room without lists";
  CodePlan none = plan();
  none.layers.assign(model_.layers, 0);
  EXPECT_FALSE(gains(none, UINT64_MAX));
}

TEST_F(ListGainOfAModel, SaysFromHowManyRowsOnStepsChoose) {
  EXPECT_EQ(lists_from(listed(), model_), rows_for_lists(model_.of(0), {128, 4, 4}));
  CodePlan early = listed();
  early.lists.from = 8192;
  EXPECT_EQ(lists_from(early, model_), 8192U) << "the spec's own number";
  EXPECT_EQ(lists_from_more(early, model_), 0U);
  // More for every further token, and less than for the first.
  const uint32_t more = lists_from_more(listed(), model_);
  EXPECT_EQ(more, more_rows_for_lists(model_.of(0), {128, 4, 4}));
  EXPECT_GT(more, lists_from(listed(), model_) / 20);
  EXPECT_LT(more, lists_from(listed(), model_));
  EXPECT_EQ(codes_shape(listed(), kTokens, params_, model_).lists_from_more, more);
  const CodePlan shape = listed();
  EXPECT_EQ(codes_shape(shape, kTokens, params_, model_).lists_from, lists_from(shape, model_));
  EXPECT_EQ(codes_shape(shape, 32768, params_, model_).list_rows, 0U)
      << "and there is no memory for less";
}

TEST_F(ListGainOfAModel, TakesNoMemoryWhereTheDeviceDoesNotChoose) {
  ModelShape older = model_;
  older.device_limits = gpu::limits_of_capability(8, 9);
  EXPECT_EQ(codes_shape(listed(), kTokens, params_, older).list_rows, 64U);
  older.device_limits.multiprocessors = size_t{8} * model_.of(0).kv_heads - 1;
  EXPECT_EQ(codes_shape(listed(), kTokens, params_, older).list_rows, 0U);
  EXPECT_NE(codes_shape(listed(), kTokens, params_, model_).list_rows, 0U);
  EXPECT_EQ(code_bytes(listed(), kTokens, params_, older).device,
            code_bytes(plan(), kTokens, params_, model_).device);
  EXPECT_FALSE(gains_by_lists(plan(), lists_, {UINT64_MAX, UINT64_MAX}, kTokens, params_, older));
}

/// Layers that can have no lists say nothing about when the others choose among theirs.
TEST_F(ListGainOfAModel, LooksAtLayersThatCanHaveLists) {
  keyhole_engine_config c = config();
  std::vector<keyhole_layer_config> layers(c.layers);
  for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &c);
  layers[1].head_dim = 512;
  c.layer_configs = layers.data();
  c.layer_count = c.layers;
  const Engine mixed(c);
  ASSERT_EQ(mixed.model().of(1).head_dim, 512U);
  const uint32_t usual = lists_from(listed(), model_);
  ASSERT_GT(usual, gpu::kListsFrom);
  EXPECT_EQ(lists_from(listed(), mixed.model()), usual);
  EXPECT_FALSE(
      gains_by_lists(plan(), lists_, {UINT64_MAX, UINT64_MAX}, kTokens, params_, mixed.model()))
      << "not all layers do";
  for (keyhole_layer_config& layer : layers) layer.head_dim = 512;
  const Engine wide(c);
  EXPECT_EQ(lists_from(listed(), wide.model()), gpu::kListsFrom);
}

TEST_F(ListGainOfAModel, AutoTakesThemWhereTheSwitchIsOn) {
  SessionParams params = params_;
  params.max_tokens = kTokens;
  params.flush_block = params.append_block = kCodeBlock;
  const auto index_with = [&](uint64_t room) {
    std::string spec = "auto";
    Budget budget = params.budget;
    resolve_auto(spec, budget, params, model_, [&](const gpu::ResidentShape&) { return room; });
    return spec;
  };
  const uint64_t bytes = code_bytes(listed(), kTokens, params, model_).device;
  EXPECT_EQ(index_with(2 * bytes), kAutoTakesLists ? "codes:k=4,v=4,lists=64" : "codes:k=4,v=4");
  EXPECT_EQ(index_with(2 * bytes - 1), "codes:k=4,v=4");
  params.max_tokens = 32768;
  EXPECT_EQ(index_with(UINT64_MAX), "codes:k=4,v=4");
}

}  // namespace
}  // namespace keyhole::runtime
