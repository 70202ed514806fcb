#include "tools/llama/engine_config.h"

#include <algorithm>

namespace keyhole::tools {

keyhole_dtype kv_dtype_of(const LlamaConfig& model) {
  if (model.dtype == "bfloat16") return KEYHOLE_BF16;
  return model.dtype == "float32" ? KEYHOLE_F32 : KEYHOLE_F16;
}

namespace {

/// RoPE's fields, the same in an engine and in a layer.
template <class Config>
void set_rope(const RopeSettings& rope, Config& config) {
  const RopeScaling& scaling = rope.scaling;
  config.rope_theta = 0.0F;
  config.rope_scaling = KEYHOLE_ROPE_NONE;
  switch (scaling.kind) {
    case RopeScaling::Kind::none: break;
    case RopeScaling::Kind::linear: config.rope_scaling = KEYHOLE_ROPE_LINEAR; break;
    case RopeScaling::Kind::llama3:
      config.rope_scaling = KEYHOLE_ROPE_LLAMA3;
      config.rope_low_freq_factor = static_cast<float>(scaling.low_freq_factor);
      config.rope_high_freq_factor = static_cast<float>(scaling.high_freq_factor);
      break;
    case RopeScaling::Kind::yarn:
      config.rope_scaling = KEYHOLE_ROPE_YARN;
      config.rope_beta_fast = static_cast<float>(scaling.beta_fast);
      config.rope_beta_slow = static_cast<float>(scaling.beta_slow);
      config.rope_whole_pairs = scaling.whole_pairs ? 1 : -1;
      break;
    case RopeScaling::Kind::longrope: return;
  }
  config.rope_theta = static_cast<float>(rope.theta);
  config.rope_dim = rope.dims;
  if (scaling.kind == RopeScaling::Kind::none) return;
  config.rope_factor = static_cast<float>(scaling.factor);
  config.rope_original_context = scaling.original_context;
}

}  // namespace

// An engine knows the shape of the model. K and q reach the library after RoPE; its parameters are
// given so that an index may undo it.
keyhole_engine_config engine_config(const LlamaConfig& model) {
  keyhole_engine_config config;
  keyhole_engine_config_init(&config);
  config.layers = std::max(1U, model.full_layers());
  config.q_heads = model.q_heads;
  config.kv_heads = model.kv_heads;
  config.head_dim = model.head_dim;
  config.kv_dtype = kv_dtype_of(model);
  config.scale = static_cast<float>(model.attention_scale);
  config.softcap = static_cast<float>(model.attention_softcap);
  set_rope(model.rope, config);
  return config;
}

std::vector<keyhole_layer_config> add_sliding_layers(const LlamaConfig& model,
                                                     keyhole_engine_config& config) {
  std::vector<keyhole_layer_config> layers(model.layers);
  uint32_t place = model.full_layers();
  for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &config);
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (!model.slides(layer)) continue;
    keyhole_layer_config& own = layers[place++];
    own.window = model.windows[layer];
    own.window_slack = kWindowSlack;
    set_rope(model.sliding_rope, own);
  }
  config.layers = config.layer_count = model.layers;
  config.layer_configs = layers.data();
  return layers;
}

}  // namespace keyhole::tools
