// Layers with scale, soft-cap and RoPE of their own, beside attention in double precision.
#include <cmath>

#include "index/partitions/rope_undo.h"
#include "keyhole/stream.h"
#include "tests/runtime/session/layer_fixture.h"

namespace keyhole::test {
namespace {

TEST_F(LayerConfig, IsFilledFromTheEngine) {
  engine_config_.scale = 0.3F;
  engine_config_.softcap = 20.0F;
  engine_config_.rope_theta = 1e4F;
  own_layers();
  EXPECT_EQ(layers_[1].scale, 0.3F);
  EXPECT_EQ(layers_[1].softcap, 20.0F);
  EXPECT_EQ(layers_[1].rope_theta, 1e4F);
  EXPECT_EQ(layers_[1].window, 0U);
  keyhole_layer_config zeros;
  keyhole_layer_config_init(&zeros, nullptr);
  EXPECT_EQ(zeros.scale, 0.0F);
  EXPECT_EQ(zeros.struct_size, sizeof zeros);
}

TEST_F(LayerConfig, IsReadBackAsItIsInEffect) {
  own_layers();
  layers_[0].window = 5;
  const EnginePtr engine = make_engine(engine_config_);
  layers_.assign(2, {});
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  ASSERT_EQ(seen.layer_count, 2U);
  EXPECT_EQ(seen.layer_configs[0].window, 5U);
  EXPECT_EQ(seen.layer_configs[0].window_slack, 16U);
  EXPECT_EQ(seen.layer_configs[1].window, 0U);
  EXPECT_FLOAT_EQ(seen.layer_configs[1].scale, 0.125F);
}

TEST_F(LayerConfig, WhatIsNotAllowedIsNamed) {
  own_layers();
  layers_[1].scale = -1.0F;
  expect_refused("layer_configs[1].scale is -1");
  own_layers();
  layers_[0].softcap = NAN;
  expect_refused("layer_configs[0].softcap");
  own_layers();
  layers_[1].window = (1U << 29) + 1;
  expect_refused("layer_configs[1].window is 536870913, allowed: 0..536870912");
  own_layers();
  layers_[1].rope_dim = 66;
  expect_refused("layer_configs[1].rope_dim is 66, allowed: even numbers up to head_dim = 64");
  own_layers();
  layers_[1].rope_theta = 1e4F;
  layers_[1].rope_scaling = 9;
  layers_[1].rope_factor = 2.0F;
  expect_refused("layer_configs[1].rope_scaling is 9");
  own_layers();
  layers_[1].rope_interleaved = 2;
  expect_refused("layer_configs[1].rope_interleaved is 2, allowed: 0, 1");
  own_layers();
  layers_[1].struct_size -= 4;
  expect_refused("layer_configs[1].struct_size");
  own_layers();
  engine_config_.layer_count = 1;
  expect_refused("layer_count is 1, allowed: as many as layers = 2");
  engine_config_.layer_configs = nullptr;
  expect_refused("layer_count is 1 with layer_configs NULL");
}

TEST_F(LayerConfig, StructsOfAnotherVersionAreRead) {
  // A caller of a later version, whose structs are longer.
  struct Longer {
    keyhole_layer_config known;
    uint64_t more[2];
  };
  std::vector<Longer> layers(2, Longer{});
  for (Longer& l : layers) keyhole_layer_config_init_sized(&l.known, sizeof l, &engine_config_);
  layers[1].known.window = 3;
  engine_config_.layer_configs = &layers[0].known;
  engine_config_.layer_count = 2;
  const EnginePtr engine = make_engine(engine_config_);
  keyhole_engine_config seen;
  keyhole_engine_config_init(&seen);
  ASSERT_OK(keyhole_engine_get_config(engine.get(), &seen));
  EXPECT_EQ(seen.layer_configs[0].window, 0U);
  EXPECT_EQ(seen.layer_configs[1].window, 3U);
}

TEST_F(LayerConfig, ScaleAndSoftCapAreTheLayers) {
  own_layers();
  layers_[0].scale = 0.05F;
  layers_[1].scale = 0.2F;
  layers_[1].softcap = 4.0F;
  const EnginePtr engine = make_engine(engine_config_);
  for (const char* index : {"flat", "ivf:C=8,probe=8", "codes:k=4,v=4"}) {
    SCOPED_TRACE(index);
    keyhole_session_config c = small_session();
    c.index = index;
    c.audit_share = 1.0;
    const SessionPtr s = make_session(engine.get(), c);
    Model model(engine_config_);
    prefill_model(s.get(), model, 400);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    expect_all_exact(s.get(), model);
    for (int i = 0; i < 10; ++i) decode(s.get(), model);
    keyhole_audit a;
    keyhole_audit_init(&a);
    ASSERT_OK(keyhole_session_get_audit(s.get(), KEYHOLE_ALL, KEYHOLE_ALL, &a));
    EXPECT_EQ(a.audits, 11U * 8);
    EXPECT_LT(a.error_max, 1e-3);
  }
}

TEST_F(LayerConfig, ScaleAndSoftCapAreTheLayersOnAStream) {
  own_layers();
  layers_[0].scale = 0.05F;
  layers_[1].scale = 0.2F;
  layers_[1].softcap = 4.0F;
  for (const bool codes : {false, true}) {
    keyhole_session_config c = small_session();
    c.audit_share = 1.0;
    if (codes) {
      c.index = "codes:k=2,v=2";
      c.flush_block = kCodeBlock;
      c.budget.top_k = 16;
      c.budget.tail = KEYHOLE_TAIL_CODES;
      c.offload_placement = KEYHOLE_PLACE_DEVICE;
    }
    StreamEngine device(engine_config_, 20000);
    const SessionPtr s = make_session(device.handle.get(), c);
    Model model(engine_config_);
    prefill_model(s.get(), model, 700);
    ASSERT_OK(keyhole_session_build(s.get(), nullptr, nullptr));
    for (int i = 0; i < 6; ++i) {
      for (uint32_t l = 0; l < 2; ++l) {
        const Token t = token();
        Answer answer{std::vector<float>(t.q.size(), NAN), std::vector<float>(4, NAN)};
        ASSERT_OK(enqueue(s.get(), l, t, answer.o, answer.lse.data(), i % 2 == 1));
        ASSERT_OK(keyhole_session_synchronize(s.get()));
        model.append(l, t.k, t.v);
        std::vector<double> lse;
        const auto o = model.attend_all(l, t.q, lse);
        expect_near(answer, o, lse, 2e-3);
      }
    }
    keyhole_audit a;
    keyhole_audit_init(&a);
    ASSERT_OK(keyhole_session_get_audit(s.get(), KEYHOLE_ALL, KEYHOLE_ALL, &a));
    EXPECT_EQ(a.audits, 6U * 8);
    EXPECT_LT(a.error_max, 1e-3);
  }
}

/// The factors of frequencies that an index undoes, of layer 1.
std::vector<float> factors(const keyhole_engine_config& c) {
  return runtime::check_ropes(c).back().inv_freq_scale;
}

// Values of Hugging Face transformers 5.23 (modeling_rope_utils, "yarn") for gpt-oss: theta 150000, factor 32, original
// context 4096, 64 dimensions, beta 32 and 1; without and with whole pairs.
TEST_F(LayerConfig, YarnSlowsPairsDownAsPublished) {
  engine_config_.rope_theta = 150000.0F;
  engine_config_.rope_scaling = KEYHOLE_ROPE_YARN;
  engine_config_.rope_factor = 32.0F;
  engine_config_.rope_original_context = 4096;
  const std::vector<double> ramp[2] = {
      {0.905551, 0.801443, 0.697335, 0.593227, 0.489119, 0.385011, 0.280903, 0.176795, 0.072688},
      {0.903125, 0.80625, 0.709375, 0.6125, 0.515625, 0.41875, 0.321875, 0.225, 0.128125}};
  for (const int whole : {0, 1}) {
    engine_config_.rope_whole_pairs = whole == 0 ? -1 : KEYHOLE_AUTO;
    const std::vector<float> seen = factors(engine_config_);
    ASSERT_EQ(seen.size(), 32U);
    for (size_t i = 0; i < 32; ++i) {
      const double want = i < 9 ? 1.0 : i < 18 ? ramp[whole][i - 9] : 0.03125;
      EXPECT_NEAR(seen[i], want, 1e-6) << "pair " << i << ", whole pairs " << whole;
    }
  }
  engine_config_.rope_beta_slow = 40.0F;
  expect_refused("rope_beta_fast > rope_beta_slow");
}

TEST_F(LayerConfig, PartialRopeTurnsTheFirstComponents) {
  engine_config_.rope_theta = 1e4F;
  engine_config_.rope_scaling = KEYHOLE_ROPE_LINEAR;
  engine_config_.rope_factor = 4.0F;
  engine_config_.rope_dim = 16;
  own_layers();
  layers_[1].rope_dim = 32;
  layers_[1].rope_factor = 2.0F;
  const auto ropes = runtime::check_ropes(engine_config_);
  ASSERT_EQ(ropes.size(), 2U);
  EXPECT_EQ(ropes[0].rotary_dim, 16U);
  EXPECT_EQ(ropes[0].inv_freq_scale, std::vector<float>(8, 0.25F));
  EXPECT_EQ(ropes[1].rotary_dim, 32U);
  EXPECT_EQ(ropes[1].inv_freq_scale, std::vector<float>(16, 0.5F));
}

// Keys that are one vector turned by their positions: an index that turns them back by the layer's RoPE sees one point,
// and k-means of one that does not sees a circle. So of the layer with the right RoPE every partition has the same
// mean.
TEST_F(LayerConfig, IndexesUndoTheRopeOfTheirLayer) {
  engine_config_.rope_theta = 100.0F;
  own_layers();
  layers_[1].rope_dim = 32;
  const EnginePtr engine = make_engine(engine_config_);
  Numbers numbers(5);
  const auto base = numbers.many(64);
  constexpr uint32_t kTokens = 512;
  for (const uint32_t layer : {0U, 1U}) {
    for (const uint32_t dims : {64U, 32U}) {
      std::vector<float> keys;
      for (uint32_t t = 0; t < kTokens; ++t) {
        std::vector<float> key = base;
        for (uint32_t i = 0; i < dims / 2; ++i) {
          const double angle = t * std::pow(100.0, -2.0 * i / dims);
          key[i] =
              static_cast<float>(base[i] * std::cos(angle) - base[i + dims / 2] * std::sin(angle));
          key[i + dims / 2] =
              static_cast<float>(base[i + dims / 2] * std::cos(angle) + base[i] * std::sin(angle));
        }
        keys.insert(keys.end(), key.begin(), key.end());
      }
      const auto& rope = engine->engine->rope(layer);
      const index::RopeUndo undo(&rope, 64, 0);
      undo.rows(keys.data(), 0, kTokens);
      double farthest = 0.0;
      for (size_t i = 0; i < keys.size(); ++i) {
        farthest = std::max(farthest, std::abs(double{keys[i]} - base[i % 64]));
      }
      if (dims == (layer == 0 ? 64U : 32U)) {
        EXPECT_LT(farthest, 1e-3) << "layer " << layer;
      } else {
        EXPECT_GT(farthest, 0.5) << "layer " << layer;
      }
    }
  }
}

}  // namespace
}  // namespace keyhole::test
