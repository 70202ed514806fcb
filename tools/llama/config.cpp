#include "tools/llama/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "runtime/files/json.h"
#include "tools/llama/config_fields.h"
#include "tools/llama/families.h"

namespace keyhole::tools {
namespace {

using nlohmann::json;

/// Shapes; the bounds keep every product of two sizes far below 2^63, and no real model comes near them.
void parse_shape(const Fields& fields, const Family& family, LlamaConfig& config) {
  const auto given = [](uint32_t value) {
    return value == 0 ? std::nullopt : std::optional<uint32_t>(value);
  };
  config.vocab_size = fields.count("vocab_size", 1U << 24, given(family.vocab_size));
  config.hidden_size = fields.count("hidden_size", 1U << 20);
  config.intermediate_size = fields.count("intermediate_size", 1U << 22);
  config.layers = fields.count("num_hidden_layers", 1024);
  config.q_heads = fields.count("num_attention_heads", 4096, given(family.q_heads));
  config.kv_heads = fields.count("num_key_value_heads", 4096,
                                 family.kv_heads == 0 ? config.q_heads : family.kv_heads);
  if (config.q_heads % config.kv_heads != 0) {
    fields.fail("num_key_value_heads", std::to_string(config.kv_heads),
                "a divisor of num_attention_heads = " + std::to_string(config.q_heads));
  }
  const bool divided = fields.find("head_dim") == nullptr && family.head_dim == 0;
  if (divided && config.hidden_size % config.q_heads != 0) {
    fields.fail("hidden_size", std::to_string(config.hidden_size),
                "a multiple of num_attention_heads = " + std::to_string(config.q_heads) +
                    " where head_dim is not given");
  }
  config.head_dim = fields.count("head_dim", 1024,
                                 divided ? config.hidden_size / config.q_heads : family.head_dim);
  if (config.head_dim % 2 != 0 || config.head_dim == 0) {
    fields.fail("head_dim", std::to_string(config.head_dim), "an even number (RoPE turns pairs)");
  }
  config.max_context = fields.count("max_position_embeddings", 1U << 31, family.max_context);
}

/// Windows of layers as layer_types says, or nothing.
std::optional<std::vector<uint32_t>> windows_by_type(const Fields& fields, uint32_t layers,
                                                     uint32_t window) {
  const json* types = fields.find("layer_types");
  if (types == nullptr) return {};
  if (!types->is_array() || types->size() != layers) {
    fields.fail("layer_types", types->dump(), "a list of " + std::to_string(layers) + " names");
  }
  std::vector<uint32_t> windows;
  for (const json& type : *types) {
    if (type != "full_attention" && type != "sliding_attention") {
      fields.fail("layer_types", type.dump(), "\"full_attention\", \"sliding_attention\"");
    }
    windows.push_back(type == "sliding_attention" ? window : 0);
  }
  return windows;
}

/// sliding_window, where null is not the same as nothing.
uint32_t parse_window(const Fields& fields, const Family& family) {
  if (fields.has("sliding_window") && fields.find("sliding_window") == nullptr) return 0;
  if (!fields.has("sliding_window")) return family.window;
  return fields.count("sliding_window", 1U << 31);
}

void parse_windows(const Fields& fields, const Family& family, LlamaConfig& config) {
  using Sliding = Family::Sliding;
  uint32_t window = family.sliding == Sliding::none ? 0 : parse_window(fields, family);
  // Windows that hold everything: no layer is treated as one that forgets.
  if (window >= config.longest_context()) window = 0;
  const uint32_t layers = config.layers;
  config.windows.assign(layers, 0);
  const auto by_type = windows_by_type(fields, layers, window);
  switch (family.sliding) {
    case Sliding::none:
    case Sliding::every_layer:
      if (family.sliding == Sliding::every_layer) config.windows.assign(layers, window);
      if (by_type && *by_type != config.windows) {
        fields.fail("layer_types", fields.find("layer_types")->dump(),
                    "the same type for every layer of model_type \"" + config.model_type + '"');
      }
      break;
    case Sliding::from_max_layer: {
      if (!fields.flag("use_sliding_window", false)) break;
      const auto first = static_cast<uint32_t>(fields.number("max_window_layers", 0, 1U << 31, 28));
      for (uint32_t layer = first; layer < layers; ++layer) config.windows[layer] = window;
      if (by_type) config.windows = *by_type;
      break;
    }
    case Sliding::pattern: {
      const uint32_t n = fields.count("sliding_window_pattern", 1U << 20, family.pattern);
      for (uint32_t layer = 0; layer < layers; ++layer) {
        if ((layer + 1) % n != 0) config.windows[layer] = window;
      }
      if (by_type) config.windows = *by_type;
      break;
    }
  }
}

void parse_numerics(const Fields& fields, const Family& family, LlamaConfig& config) {
  const std::string activation = fields.text(family.activation_field, family.activation);
  if (activation != "silu" && activation != "gelu_pytorch_tanh") {
    fields.fail(family.activation_field, '"' + activation + '"', "\"silu\", \"gelu_pytorch_tanh\"");
  }
  config.activation = activation == "silu" ? Activation::silu : Activation::gelu_tanh;
  config.rms_norm_eps = fields.number("rms_norm_eps", 0.0, 1.0, family.rms_norm_eps);
  config.attention_scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  if (!family.gemma) return;
  config.norm_adds_one = true;
  config.output_norms = true;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
  config.attention_scale = 1.0 / std::sqrt(fields.number("query_pre_attn_scalar", 1e-6, 1e9, 256));
  const bool null_cap = fields.has("final_logit_softcapping");
  config.final_softcap =
      fields.number("final_logit_softcapping", 0.0, 1e6, null_cap ? 0.0 : family.final_softcap);
  if (family.may_have_attention_softcap) {
    const bool null = fields.has("attn_logit_softcapping");
    config.attention_softcap = fields.number("attn_logit_softcapping", 0.0, 1e6, null ? 0.0 : 50.0);
  }
}

/// Refuses what this decoder would silently compute wrongly.
void refuse_what_is_not_computed(const Fields& fields, const Family& family) {
  const auto never = [&](const char* field, const std::string& why) {
    if (fields.flag(field, false)) fields.fail(field, "true", "false (" + why + ')');
  };
  const std::string type = family.model_type;
  if (!family.may_have_attention_bias)
    never("attention_bias", "model_type \"" + type + "\" has none");
  if (!family.may_have_mlp_bias) never("mlp_bias", "model_type \"" + type + "\" has none");
  never("use_bidirectional_attention", "attention to later tokens is not implemented");
  if (!family.may_have_attention_softcap && fields.find("attn_logit_softcapping") != nullptr) {
    fields.fail("attn_logit_softcapping", fields.find("attn_logit_softcapping")->dump(),
                "null for model_type \"" + type + '"');
  }
  if (const json* quantised = fields.find("quantization_config")) {
    fields.fail("quantization_config", quantised->dump(), "none (weights in F32, F16 or BF16)");
  }
}

void parse_tokens(const Fields& fields, LlamaConfig& config) {
  const auto token = [&](const char* field, const json& value) {
    const std::string allowed =
        "a token id below vocab_size = " + std::to_string(config.vocab_size);
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= config.vocab_size) {
      fields.fail(field, value.dump(), allowed);
    }
    return value.get<uint32_t>();
  };
  if (const json* bos = fields.find("bos_token_id")) config.bos_token = token("bos_token_id", *bos);
  if (const json* eos = fields.find("eos_token_id")) {
    config.eos_tokens.clear();
    if (eos->is_array()) {
      for (const json& value : *eos) config.eos_tokens.push_back(token("eos_token_id", value));
    } else {
      config.eos_tokens.push_back(token("eos_token_id", *eos));
    }
  }
}

LlamaConfig parse_text_model(const Fields& fields, const Family& family) {
  LlamaConfig config;
  config.model_type = family.model_type;
  refuse_what_is_not_computed(fields, family);
  parse_shape(fields, family, config);
  parse_numerics(fields, family, config);
  config.head_norms = family.head_norms;
  config.fused_tensors = family.fused_tensors;
  const bool attention_bias = fields.flag("attention_bias", false);
  config.qkv_bias = family.qkv_bias || attention_bias;
  config.output_bias = attention_bias;
  config.mlp_bias = fields.flag("mlp_bias", false);
  config.tied_output = fields.flag("tie_word_embeddings", family.tied_output);
  config.dtype = fields.text("dtype", fields.text("torch_dtype", ""));
  const Ropes ropes = parse_ropes(
      fields, {family.theta, family.sliding_theta, family.partial_rope, family.only_longrope,
               config.head_dim, config.max_context, family.original_context});
  config.rope = ropes.full;
  config.sliding_rope = ropes.sliding;
  config.unread_rope = ropes.unread;
  parse_windows(fields, family, config);
  parse_tokens(fields, config);
  return config;
}

/// Gemma 3 with pictures: its text model is described inside, what generation needs mostly outside.
LlamaConfig parse_gemma3(const Fields& fields) {
  const std::optional<Fields> text = fields.object("text_config");
  if (!text) fields.fail("text_config", "missing", "an object with the text model's fields");
  LlamaConfig config = parse_text_model(*text, *find_family("gemma3_text"));
  if (const json* quantised = fields.find("quantization_config")) {
    fields.fail("quantization_config", quantised->dump(), "none (weights in F32, F16 or BF16)");
  }
  if (config.final_softcap > 0.0) {
    text->fail("final_logit_softcapping", shown(config.final_softcap),
               "null for model_type \"gemma3\"");
  }
  config.has_pictures = true;
  config.tied_output = fields.flag("tie_word_embeddings", config.tied_output);
  config.dtype = fields.text("dtype", fields.text("torch_dtype", config.dtype));
  parse_tokens(fields, config);
  return config;
}

}  // namespace

LlamaConfig parse_llama_config(std::string_view json_text, const std::string& source) {
  const json root = json::parse(json_text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) throw std::runtime_error(source + ": not valid JSON");
  if (!root.is_object()) throw std::runtime_error(source + ": not a JSON object");
  const Fields fields(root, source);
  const std::string model_type = fields.text("model_type", "llama");
  if (model_type == "gemma3") return parse_gemma3(fields);
  const Family* family = find_family(model_type);
  if (family == nullptr) {
    fields.fail("model_type", '"' + model_type + '"',
                family_names() + " (the forward passes that are built in)");
  }
  return parse_text_model(fields, *family);
}

uint64_t LlamaConfig::longest_context() const {
  const RopeScaling& scaling = rope.scaling;
  switch (scaling.kind) {
    case RopeScaling::Kind::linear:
      // Gemma 3's files give the stretched context, and linear scaling all the same.
      if (sliding_rope != rope) return max_context;
      return static_cast<uint64_t>(max_context * std::max(scaling.factor, 1.0));
    case RopeScaling::Kind::llama3:
    case RopeScaling::Kind::yarn:
      return std::max<uint64_t>(max_context,
                                static_cast<uint64_t>(scaling.original_context * scaling.factor));
    case RopeScaling::Kind::longrope:
    case RopeScaling::Kind::none: break;
  }
  return max_context;
}

uint32_t LlamaConfig::full_layers() const {
  uint32_t full = 0;
  for (uint32_t layer = 0; layer < layers; ++layer) full += slides(layer) ? 0 : 1;
  return full;
}

std::vector<std::optional<uint32_t>> LlamaConfig::places_among_full() const {
  std::vector<std::optional<uint32_t>> places(layers);
  uint32_t next = 0;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    if (!slides(layer)) places[layer] = next++;
  }
  return places;
}

LlamaConfig load_llama_config(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw std::runtime_error(path.string() + ": cannot be opened (a Hugging Face folder needs it)");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return parse_llama_config(text, path.string());
}

}  // namespace keyhole::tools
