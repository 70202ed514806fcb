// What layers have of their own: the engine's fields for all of them, or one struct each.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/plan/config.h"
#include "runtime/plan/layer_shape.h"
#include "runtime/plan/refusals.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kMostWindow = 1U << 29;
constexpr uint32_t kDefaultSlack = 16;
constexpr float kDefaultBetaFast = 32.0F;
constexpr float kDefaultBetaSlow = 1.0F;
constexpr double kTwoPi = 2.0 * 3.14159265358979323846;

void check_not_negative(const std::string& field, float value) {
  if (std::isfinite(value) && value >= 0.0F) return;
  bad(field + " is " + std::to_string(value) + ", allowed: finite and at least " +
      std::to_string(0.0F));
}

void check_window(const std::string& field, uint32_t value) {
  if (value <= kMostWindow) return;
  bad(field + " is " + std::to_string(value) + ", allowed: 0.." + std::to_string(kMostWindow));
}

/// The parameters of llama3 scaling (Llama 3.1's rule): wavelengths beyond original/low are divided by the factor,
/// those below original/high are kept, in between a linear blend.
void scale_llama3(const keyhole_layer_config& c, const std::string& prefix,
                  index::RopeParams& rope) {
  const double low = c.rope_low_freq_factor;
  const double high = c.rope_high_freq_factor;
  if (!(low > 0.0 && high > low && std::isfinite(high)) || c.rope_original_context == 0) {
    bad("llama3 RoPE scaling needs 0 < " + prefix + "rope_low_freq_factor < " + prefix +
        "rope_high_freq_factor and rope_original_context > 0, seen: " + std::to_string(low) + ", " +
        std::to_string(high) + ", " + std::to_string(c.rope_original_context));
  }
  for (uint32_t i = 0; i < rope.rotary_dim / 2; ++i) {
    const double inv_freq = std::pow(static_cast<double>(rope.theta), -2.0 * i / rope.rotary_dim);
    const double turns = c.rope_original_context * inv_freq / kTwoPi;
    const double blend = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    rope.inv_freq_scale.push_back(static_cast<float>((1.0 - blend) / c.rope_factor + blend));
  }
}

/// YaRN (arXiv:2309.00071): pairs that turn more than beta_fast times within the original context stay, those that turn
/// less than beta_slow times are slowed down by the factor, and between the two lies a ramp over the pairs' numbers.
void scale_yarn(const keyhole_layer_config& c, const std::string& prefix, index::RopeParams& rope) {
  const double fast = c.rope_beta_fast > 0.0F ? c.rope_beta_fast : kDefaultBetaFast;
  const double slow = c.rope_beta_slow > 0.0F ? c.rope_beta_slow : kDefaultBetaSlow;
  if (!(fast > slow && std::isfinite(fast)) || c.rope_original_context == 0 ||
      !(c.rope_theta > 1.0F) || c.rope_beta_fast < 0.0F || c.rope_beta_slow < 0.0F) {
    bad("yarn RoPE scaling needs " + prefix + "rope_beta_fast > rope_beta_slow >= 0 (0: AUTO), " +
        "rope_original_context > 0 and rope_theta > 1, seen: " + std::to_string(c.rope_beta_fast) +
        ", " + std::to_string(c.rope_beta_slow) + ", " + std::to_string(c.rope_original_context) +
        ", " + std::to_string(c.rope_theta));
  }
  if (c.rope_whole_pairs < -1 || c.rope_whole_pairs > 1) {
    bad(prefix + "rope_whole_pairs is " + std::to_string(c.rope_whole_pairs) +
        ", allowed: -1, KEYHOLE_AUTO (0), 1");
  }
  const double dim = rope.rotary_dim;
  const auto pair_that_turns = [&](double times) {
    return dim * std::log(c.rope_original_context / (times * kTwoPi)) /
           (2.0 * std::log(static_cast<double>(c.rope_theta)));
  };
  double low = pair_that_turns(fast);
  double high = pair_that_turns(slow);
  if (c.rope_whole_pairs != -1) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  constexpr double kLeastRamp = 0.001;
  const double width = high == low ? kLeastRamp : high - low;
  for (uint32_t i = 0; i < rope.rotary_dim / 2; ++i) {
    const double slowed = std::clamp((i - low) / width, 0.0, 1.0);
    rope.inv_freq_scale.push_back(static_cast<float>(slowed / c.rope_factor + 1.0 - slowed));
  }
}

index::RopeParams check_rope(const keyhole_layer_config& c, uint32_t head_dim,
                             const std::string& prefix) {
  index::RopeParams rope;
  check_not_negative(prefix + "rope_theta", c.rope_theta);
  if (c.rope_dim > head_dim || c.rope_dim % 2 != 0) {
    bad(prefix + "rope_dim is " + std::to_string(c.rope_dim) +
        ", allowed: even numbers up to head_dim = " + std::to_string(head_dim) +
        ", KEYHOLE_AUTO (0)");
  }
  if (c.rope_interleaved != 0 && c.rope_interleaved != 1) {
    bad(prefix + "rope_interleaved is " + std::to_string(c.rope_interleaved) + ", allowed: 0, 1");
  }
  rope.interleaved = c.rope_interleaved == 1;
  rope.theta = c.rope_theta;
  rope.rotary_dim = c.rope_dim != KEYHOLE_AUTO ? c.rope_dim : head_dim;
  if (c.rope_theta == 0.0F || c.rope_scaling == KEYHOLE_ROPE_NONE) return rope;
  if (!(std::isfinite(c.rope_factor) && c.rope_factor > 0.0F)) {
    bad(prefix + "rope_factor is " + std::to_string(c.rope_factor) +
        ", allowed: finite and above 0");
  }
  switch (c.rope_scaling) {
    case KEYHOLE_ROPE_LINEAR:
      rope.inv_freq_scale.assign(rope.rotary_dim / 2, 1.0F / c.rope_factor);
      return rope;
    case KEYHOLE_ROPE_LLAMA3: scale_llama3(c, prefix, rope); return rope;
    case KEYHOLE_ROPE_YARN: scale_yarn(c, prefix, rope); return rope;
    default: break;
  }
  bad(prefix + "rope_scaling is " + std::to_string(c.rope_scaling) +
      ", allowed: KEYHOLE_ROPE_NONE (0), KEYHOLE_ROPE_LINEAR (1), KEYHOLE_ROPE_LLAMA3 (2), "
      "KEYHOLE_ROPE_YARN (3)");
}

/// Of an engine or a layer.
template <class Config>
void choose_rope(Config& c) {
  if (c.rope_theta == 0.0F) return;
  if (c.rope_dim == KEYHOLE_AUTO) c.rope_dim = c.head_dim;
  if (c.rope_scaling != KEYHOLE_ROPE_YARN) return;
  if (c.rope_beta_fast == 0.0F) c.rope_beta_fast = kDefaultBetaFast;
  if (c.rope_beta_slow == 0.0F) c.rope_beta_slow = kDefaultBetaSlow;
  if (c.rope_whole_pairs == static_cast<int32_t>(KEYHOLE_AUTO)) c.rope_whole_pairs = 1;
}

std::string prefix_of(size_t layer) { return "layer_configs[" + std::to_string(layer) + "]."; }

}  // namespace

void complete_rope(keyhole_engine_config& config) { choose_rope(config); }

void check_layer_shape(const keyhole_layer_config& c, const std::string& prefix) {
  check_not_negative(prefix + "scale", c.scale);
  check_not_negative(prefix + "softcap", c.softcap);
  check_window(prefix + "window", c.window);
  check_window(prefix + "window_slack", c.window_slack);
}

keyhole_layer_config layer_of(const keyhole_engine_config& c) {
  keyhole_layer_config layer{};
  layer.struct_size = sizeof layer;
  layer.head_dim = c.head_dim;
  layer.kv_heads = c.kv_heads;
  layer.q_heads = c.q_heads;
  layer.scale = c.scale;
  layer.softcap = c.softcap;
  layer.rope_theta = c.rope_theta;
  layer.rope_scaling = c.rope_scaling;
  layer.rope_factor = c.rope_factor;
  layer.rope_low_freq_factor = c.rope_low_freq_factor;
  layer.rope_high_freq_factor = c.rope_high_freq_factor;
  layer.rope_original_context = c.rope_original_context;
  layer.rope_dim = c.rope_dim;
  layer.rope_beta_fast = c.rope_beta_fast;
  layer.rope_beta_slow = c.rope_beta_slow;
  layer.rope_whole_pairs = c.rope_whole_pairs;
  layer.rope_interleaved = c.rope_interleaved;
  return layer;
}

std::vector<keyhole_layer_config> read_layers(const keyhole_engine_config& c) {
  std::vector<keyhole_layer_config> layers;
  if (c.layer_configs == nullptr) {
    if (c.layer_count != 0) {
      bad("layer_count is " + std::to_string(c.layer_count) +
          " with layer_configs NULL, allowed: 0");
    }
    return layers;
  }
  if (c.layer_count != c.layers) {
    bad("layer_count is " + std::to_string(c.layer_count) +
        ", allowed: as many as layers = " + std::to_string(c.layers));
  }
  check_heads({c.q_heads, c.kv_heads, c.head_dim}, "");
  // Elements are of the caller's version, and so are their distances.
  const size_t stride = c.layer_configs->struct_size;
  const auto* bytes = reinterpret_cast<const std::byte*>(c.layer_configs);
  for (size_t i = 0; i < c.layers; ++i) {
    const auto* from = reinterpret_cast<const keyhole_layer_config*>(bytes + i * stride);
    keyhole_layer_config layer = read_struct(from, keyhole_layer_config{}, "layer_configs[i]");
    if (from->struct_size != stride) {
      bad(prefix_of(i) + "struct_size is " + std::to_string(from->struct_size) +
          ", allowed: that of the first, " + std::to_string(stride));
    }
    check_layer_shape(layer, prefix_of(i));
    if (layer.head_dim == KEYHOLE_AUTO) layer.head_dim = c.head_dim;
    if (layer.kv_heads == KEYHOLE_AUTO) layer.kv_heads = c.kv_heads;
    if (layer.q_heads == KEYHOLE_AUTO) layer.q_heads = c.q_heads;
    check_heads({layer.q_heads, layer.kv_heads, layer.head_dim}, prefix_of(i));
    if (layer.scale == 0.0F) layer.scale = 1.0F / std::sqrt(static_cast<float>(layer.head_dim));
    if (layer.window == 0) {
      layer.window_slack = 0;
    } else if (layer.window_slack == KEYHOLE_AUTO) {
      layer.window_slack = kDefaultSlack;
    }
    choose_rope(layer);
    layers.push_back(layer);
  }
  return layers;
}

std::vector<index::RopeParams> check_ropes(const keyhole_engine_config& c) {
  const std::vector<keyhole_layer_config> layers = read_layers(c);
  std::vector<index::RopeParams> ropes;
  if (layers.empty()) ropes.push_back(check_rope(layer_of(c), c.head_dim, ""));
  for (size_t i = 0; i < layers.size(); ++i) {
    ropes.push_back(check_rope(layers[i], layers[i].head_dim, prefix_of(i)));
  }
  return ropes;
}

}  // namespace keyhole::runtime
