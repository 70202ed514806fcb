#include "tools/engines/llama.cpp/random_models.h"

#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace keyhole::llama_cpp {
namespace {

constexpr uint32_t kWindow = 64;
constexpr uint32_t kExperts = 4;

/// What a model's file says about it. Keys are written without the architecture's name, which stands before them.
class Metadata {
 public:
  explicit Metadata(const std::string& architecture)
      : architecture_(architecture), all_(gguf_init_empty(), gguf_free) {
    gguf_set_val_str(all_.get(), "general.architecture", architecture.c_str());
    gguf_set_val_str(all_.get(), "tokenizer.ggml.model", "no_vocab");
  }
  void set(std::string_view key, uint32_t value) {
    gguf_set_val_u32(all_.get(), full(key).c_str(), value);
  }
  void set(std::string_view key, float value) {
    gguf_set_val_f32(all_.get(), full(key).c_str(), value);
  }
  void set(std::string_view key, const std::vector<uint32_t>& values) {
    gguf_set_arr_data(all_.get(), full(key).c_str(), GGUF_TYPE_UINT32, values.data(),
                      values.size());
  }
  [[nodiscard]] gguf_context* get() const { return all_.get(); }

 private:
  [[nodiscard]] std::string full(std::string_view key) const {
    return architecture_ + "." + std::string(key);
  }
  std::string architecture_;
  std::unique_ptr<gguf_context, void (*)(gguf_context*)> all_;
};

constexpr std::array kClasses{
    ModelClass{"llama", "llama", 3, 4, 2, 64, 3, 3},
    ModelClass{"llama, heads of 80", "llama", 2, 4, 1, 80, 2, 2},
    ModelClass{"llama, heads of 48", "llama", 2, 4, 2, 48, 2, 0},
    ModelClass{"qwen2", "qwen2", 2, 4, 1, 128, 2, 2},
    ModelClass{"qwen3moe", "qwen3moe", 2, 8, 1, 128, 2, 2},
    ModelClass{"qwen35", "qwen35", 4, 6, 1, 256, 2, 2},
    ModelClass{"qwen35moe", "qwen35moe", 4, 8, 1, 256, 2, 2},
    ModelClass{"qwen3next", "qwen3next", 4, 4, 2, 256, 2, 2},
    ModelClass{"gemma2", "gemma2", 4, 4, 2, 256, 4, 2},
    ModelClass{"gemma3", "gemma3", 6, 4, 1, 256, 6, 2},
    ModelClass{"gemma4", "gemma4", 6, 4, 1, 512, 6, 2},
    ModelClass{"gemma4, shared cache", "gemma4", 9, 4, 1, 512, 6, 2},
    ModelClass{"gpt-oss", "gpt-oss", 4, 8, 2, 64, 4, 2},
    ModelClass{"llama4", "llama4", 4, 4, 2, 128, 4, 4},
    ModelClass{"deepseek2", "deepseek2", 2, 2, 1, 576, 2, 0},
    ModelClass{"mpt", "mpt", 2, 4, 4, 64, 2, 0},
};

/// 1 for each layer with a sliding window: all but every `period`-th.
std::vector<uint32_t> windows(const ModelClass& c, uint32_t period) {
  std::vector<uint32_t> pattern;
  for (uint32_t i = 0; i < c.layers; ++i) pattern.push_back((i + 1) % period != 0 ? 1 : 0);
  return pattern;
}

void set_experts(Metadata& model) {
  // All of them are used: with a choice, rounding would change which.
  model.set("expert_count", kExperts);
  model.set("expert_used_count", kExperts);
  model.set("expert_shared_count", 1U);
  model.set("expert_feed_forward_length", 96U);
  model.set("expert_shared_feed_forward_length", 96U);
  model.set("interleave_moe_layer_step", 1U);
}

/// Layers with a recurrent state in the place of a cache, but for every second one.
void set_recurrent(Metadata& model) {
  model.set("full_attention_interval", 2U);
  model.set("rope.dimension_count", 64U);
  model.set("rope.dimension_sections", std::vector<uint32_t>{11, 11, 10, 0});
  model.set("ssm.conv_kernel", 4U);
  model.set("ssm.inner_size", 256U);
  model.set("ssm.state_size", 128U);
  model.set("ssm.time_step_rank", 2U);
  model.set("ssm.group_count", 2U);
}

void set_gemma4(Metadata& model, const ModelClass& c) {
  const bool shared = std::string_view(c.name) != "gemma4";
  const std::vector<uint32_t> pattern = windows(c, 3);
  std::vector<uint32_t> kv_heads;
  for (const uint32_t slides : pattern) kv_heads.push_back(slides != 0 ? 2 : 1);
  model.set("attention.head_count_kv", kv_heads);
  model.set("attention.sliding_window_pattern", pattern);
  model.set("attention.key_length_swa", 256U);
  model.set("attention.value_length_swa", 256U);
  model.set("rope.dimension_count_swa", 256U);
  model.set("rope.freq_base_swa", 10000.0F);
  model.set("attention.shared_kv_layers", shared ? 3U : 0U);
  model.set("embedding_length_per_layer_input", 32U);
}

void set_latent(Metadata& model) {
  model.set("leading_dense_block_count", 1U);
  model.set("attention.key_length", 576U);
  model.set("attention.value_length", 512U);
  model.set("attention.key_length_mla", 192U);
  model.set("attention.value_length_mla", 128U);
  model.set("attention.q_lora_rank", 128U);
  model.set("attention.kv_lora_rank", 512U);
  model.set("rope.dimension_count", 64U);
}

Metadata describe(const ModelClass& c) {
  const std::string_view architecture = c.architecture;
  Metadata model(c.architecture);
  model.set("vocab_size", kVocabulary);
  model.set("context_length", 4096U);
  model.set("embedding_length", architecture == "qwen2" ? c.q_heads * c.head_dim : 256U);
  model.set("block_count", c.layers);
  model.set("feed_forward_length", 256U);
  model.set("attention.head_count", c.q_heads);
  model.set("attention.head_count_kv", c.kv_heads);
  model.set("attention.key_length", c.head_dim);
  model.set("attention.value_length", c.head_dim);
  model.set("attention.layer_norm_epsilon", 1e-5F);
  model.set("attention.layer_norm_rms_epsilon", 1e-5F);
  model.set("attention.sliding_window", kWindow);
  model.set("rope.dimension_count", c.head_dim);
  model.set("rope.freq_base", 10000.0F);
  if (architecture.find("moe") != std::string_view::npos || architecture == "qwen3next" ||
      architecture == "gpt-oss" || architecture == "llama4" || architecture == "deepseek2") {
    set_experts(model);
  }
  if (architecture.starts_with("qwen35") || architecture == "qwen3next") set_recurrent(model);
  if (architecture == "gemma2") {
    model.set("attn_logit_softcapping", 5.0F);
    model.set("final_logit_softcapping", 30.0F);
  }
  if (architecture == "gemma3") {
    model.set("attention.sliding_window_pattern", windows(c, 3));
    model.set("rope.freq_base_swa", 10000.0F);
  }
  if (architecture == "gemma4") set_gemma4(model, c);
  if (architecture == "deepseek2") set_latent(model);
  if (architecture == "mpt") model.set("attention.max_alibi_bias", 8.0F);
  return model;
}

bool contains(std::string_view name, std::string_view part) {
  return name.find(part) != std::string_view::npos;
}

/// Numbers around `middle`, spread by `spread`, as the tensor's name and size want them.
struct Spread {
  float middle = 0;
  float spread = 0;
};

/// What models are filled with.
struct Filling {
  uint32_t seed;
  /// Spread of queries and keys, where a norm's weights or the projection make it.
  float heads;
  /// Whether scores are products as they are, not divided by the root of the components.
  bool unscaled;
};

Spread spread_of(const ggml_tensor* tensor, const Filling& filling) {
  const std::string_view name = tensor->name;
  if (contains(name, "ssm_a")) return {-1.0F, 0.3F};
  if (contains(name, "rope_freqs")) return {1, 0};
  if (contains(name, "q_norm") || contains(name, "k_norm")) {
    const auto components = static_cast<float>(tensor->ne[0]);
    const float middle = filling.heads * (filling.unscaled ? std::pow(components, -0.25F) : 1.0F);
    return {middle, 0.12F * middle};
  }
  if (contains(name, "norm") && name.ends_with("weight")) return {1, 0.1F};
  if (contains(name, "scale")) return {1, 0.1F};
  if (contains(name, "sinks")) return {1, 1};
  if (name.ends_with("bias")) return {0, 0.1F};
  if (contains(name, "token_embd")) return {0, 1};
  const float fan_in = 1 / std::sqrt(static_cast<float>(tensor->ne[0]));
  if (contains(name, "attn_q.") || contains(name, "attn_k.")) return {0, filling.heads * fan_in};
  if (name == "output.weight") return {0, 2 * fan_in};
  return {0, fan_in};
}

void fill(ggml_tensor* tensor, void* filling) {
  const Filling& how = *static_cast<Filling*>(filling);
  const Spread s = spread_of(tensor, how);
  // Numbers that are uniform have the same variance from the square root of three times the spread.
  const float half = s.spread * 1.7320508F;
  std::seed_seq seeds{how.seed, static_cast<uint32_t>(std::hash<std::string>()(tensor->name))};
  std::mt19937 random(seeds);
  std::vector<float> numbers(static_cast<size_t>(ggml_nelements(tensor)));
  for (float& number : numbers) {
    const float unit = static_cast<float>(random() >> 8U) / 16777216.0F;
    number = s.middle + half * (2 * unit - 1);
  }
  ggml_backend_tensor_set(tensor, numbers.data(), 0, numbers.size() * sizeof(float));
}

}  // namespace

std::span<const ModelClass> model_classes() { return kClasses; }

llama_model* make_random_model(const ModelClass& model_class, uint32_t seed, float spread,
                               const llama_model_params& params) {
  const Metadata metadata = describe(model_class);
  Filling filling{seed, std::sqrt(spread), std::string_view(model_class.architecture) == "gemma4"};
  return llama_model_init_from_user(metadata.get(), fill, &filling, params);
}

}  // namespace keyhole::llama_cpp
