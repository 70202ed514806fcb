// Sessions whose layers have heads of their own, beside attention in double precision of the same shapes.
#pragma once

#include <vector>

#include "tests/runtime/new_tokens.h"

namespace keyhole::test {

/// The heads of a layer.
struct Heads {
  uint32_t q_heads, kv_heads, head_dim;
};

/// An engine config with layers of these shapes, to which it points, so it is neither moved nor copied.
struct ShapedConfig {
  explicit ShapedConfig(const std::vector<Heads>& heads, uint32_t threads = 2)
      : engine(small_engine(threads)), layers(heads.size()) {
    engine.layers = engine.layer_count = static_cast<uint32_t>(heads.size());
    for (size_t l = 0; l < heads.size(); ++l) {
      keyhole_layer_config_init(&layers[l], &engine);
      layers[l].q_heads = heads[l].q_heads;
      layers[l].kv_heads = heads[l].kv_heads;
      layers[l].head_dim = heads[l].head_dim;
    }
    engine.layer_configs = layers.data();
  }
  ShapedConfig(const ShapedConfig&) = delete;
  ShapedConfig& operator=(const ShapedConfig&) = delete;

  [[nodiscard]] Shape shape(uint32_t layer) const { return {engine, layer}; }

  keyhole_engine_config engine;
  std::vector<keyhole_layer_config> layers;
};

/// Layers as models have them: narrow ones with a window, wide ones with fewer KV heads, and one with more heads than
/// all others.
inline const std::vector<Heads> kHeads = {{4, 2, 64}, {8, 1, 128}, {4, 4, 96}, {4, 2, 64}};

/// Expects a call to fail with this status, and its message to have this part.
inline void expect_error(keyhole_status seen, keyhole_status status, const std::string& text) {
  EXPECT_EQ(seen, status);
  expect_error_text(text);
}

/// Random tokens for all layers, of the session and of the model beside it.
inline void fill(keyhole_session* s, Model& model, const ShapedConfig& c, uint32_t n,
                 Numbers& numbers) {
  for (uint32_t l = 0; l < c.engine.layers; ++l) {
    prefill_both(s, model, c.shape(l), l, n, numbers);
  }
}

}  // namespace keyhole::test
