#include "tools/llama/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

namespace keyhole::tools {
namespace {

using nlohmann::json;

std::string shown(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

/// One JSON object of a config with the errors that its fields can have.
class Fields {
 public:
  Fields(const json& object, std::string source) : object_(object), source_(std::move(source)) {}

  [[noreturn]] void fail(const std::string& field, const std::string& seen,
                         const std::string& allowed) const {
    throw std::runtime_error(source_ + ": " + field + " is " + seen + "; allowed: " + allowed);
  }

  /// The field's value, or nullptr if it is absent or null (which Hugging Face uses alike).
  const json* find(const std::string& field) const {
    const auto it = object_.find(field);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  double number(const std::string& field, double low, double high,
                std::optional<double> fallback = {}) const {
    const json* value = find(field);
    const std::string allowed = "a number from " + shown(low) + " to " + shown(high);
    if (value == nullptr) {
      if (fallback) return *fallback;
      fail(field, "missing", allowed);
    }
    if (!value->is_number()) fail(field, value->dump(), allowed);
    const double number = value->get<double>();
    if (!(number >= low && number <= high)) fail(field, value->dump(), allowed);
    return number;
  }

  uint32_t count(const std::string& field, uint32_t high,
                 std::optional<uint32_t> fallback = {}) const {
    const json* value = find(field);
    const std::string allowed = "a whole number from 1 to " + std::to_string(high);
    if (value == nullptr) {
      if (fallback) return *fallback;
      fail(field, "missing", allowed);
    }
    // is_number_unsigned is false for every negative and every fractional literal.
    if (!value->is_number_unsigned()) fail(field, value->dump(), allowed);
    const auto number = value->get<uint64_t>();
    if (number < 1 || number > high) fail(field, value->dump(), allowed);
    return static_cast<uint32_t>(number);
  }

  bool flag(const std::string& field, bool fallback) const {
    const json* value = find(field);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) fail(field, value->dump(), "true or false");
    return value->get<bool>();
  }

  std::string text(const std::string& field, const std::string& fallback) const {
    const json* value = find(field);
    if (value == nullptr) return fallback;
    if (!value->is_string()) fail(field, value->dump(), "a string");
    return value->get<std::string>();
  }

  const std::string& source() const { return source_; }

 private:
  const json& object_;
  std::string source_;
};

RopeScaling parse_rope_scaling(const Fields& fields) {
  // "type" is what files older than "rope_type" say.
  const std::string kind = fields.text("rope_type", fields.text("type", "default"));
  RopeScaling scaling;
  if (kind == "default") return scaling;
  if (kind != "linear" && kind != "llama3") {
    fields.fail("rope_type", '"' + kind + '"', "\"default\", \"linear\", \"llama3\"");
  }
  scaling.factor = fields.number("factor", 1e-3, 1e6);
  if (kind == "linear") {
    scaling.kind = RopeScaling::Kind::linear;
    return scaling;
  }
  scaling.kind = RopeScaling::Kind::llama3;
  scaling.low_freq_factor = fields.number("low_freq_factor", 1e-6, 1e6);
  scaling.high_freq_factor = fields.number("high_freq_factor", 1e-6, 1e6);
  scaling.original_context = fields.count("original_max_position_embeddings", 1U << 31);
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    fields.fail("high_freq_factor", shown(scaling.high_freq_factor),
                "more than low_freq_factor, which is " + shown(scaling.low_freq_factor));
  }
  return scaling;
}

/// RoPE's fields: `rope_theta` and `rope_scaling` at the top, or both inside `rope_parameters` (newer).
void parse_rope(const Fields& fields, LlamaConfig& config) {
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const json* object = fields.find(name);
    if (object == nullptr) continue;
    if (!object->is_object()) fields.fail(name, object->dump(), "an object or null");
    const Fields inner(*object, fields.source() + ": " + name);
    config.rope_scaling = parse_rope_scaling(inner);
    config.rope_theta = inner.number("rope_theta", 1.0, 1e12, config.rope_theta);
    break;
  }
  config.rope_theta = fields.number("rope_theta", 1.0, 1e12, config.rope_theta);
  if (fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0) {
    fields.fail("partial_rotary_factor", fields.find("partial_rotary_factor")->dump(), "1");
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
    if (eos->is_array()) {
      for (const json& value : *eos) config.eos_tokens.push_back(token("eos_token_id", value));
    } else {
      config.eos_tokens.push_back(token("eos_token_id", *eos));
    }
  }
}

/// Refuses what this decoder would silently compute wrongly.
void refuse_other_architectures(const Fields& fields) {
  const auto only = [&](const char* field, const std::string& wanted) {
    const std::string seen = fields.text(field, wanted);
    if (seen != wanted) fields.fail(field, '"' + seen + '"', '"' + wanted + '"');
  };
  only("model_type", "llama");
  only("hidden_act", "silu");
  for (const char* field : {"attention_bias", "mlp_bias"}) {
    if (fields.flag(field, false)) {
      fields.fail(field, "true", "false (projections with a bias are not implemented)");
    }
  }
  if (const json* quantised = fields.find("quantization_config")) {
    fields.fail("quantization_config", quantised->dump(), "none (weights in F32, F16 or BF16)");
  }
}

}  // namespace

LlamaConfig parse_llama_config(std::string_view json_text, const std::string& source) {
  const json root = json::parse(json_text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) throw std::runtime_error(source + ": not valid JSON");
  if (!root.is_object()) throw std::runtime_error(source + ": not a JSON object");
  const Fields fields(root, source);
  refuse_other_architectures(fields);

  LlamaConfig config;
  // The bounds keep every product of two sizes far below 2^63; no real model comes near them.
  config.vocab_size = fields.count("vocab_size", 1U << 24);
  config.hidden_size = fields.count("hidden_size", 1U << 20);
  config.intermediate_size = fields.count("intermediate_size", 1U << 22);
  config.layers = fields.count("num_hidden_layers", 1024);
  config.q_heads = fields.count("num_attention_heads", 4096);
  config.kv_heads = fields.count("num_key_value_heads", 4096, config.q_heads);
  if (config.q_heads % config.kv_heads != 0) {
    fields.fail("num_key_value_heads", std::to_string(config.kv_heads),
                "a divisor of num_attention_heads = " + std::to_string(config.q_heads));
  }
  if (fields.find("head_dim") == nullptr && config.hidden_size % config.q_heads != 0) {
    fields.fail("hidden_size", std::to_string(config.hidden_size),
                "a multiple of num_attention_heads = " + std::to_string(config.q_heads) +
                    " where head_dim is not given");
  }
  config.head_dim = fields.count("head_dim", 1024, config.hidden_size / config.q_heads);
  if (config.head_dim % 2 != 0 || config.head_dim == 0) {
    fields.fail("head_dim", std::to_string(config.head_dim), "an even number (RoPE turns pairs)");
  }
  config.max_context = fields.count("max_position_embeddings", 1U << 31, 2048);
  config.rms_norm_eps = fields.number("rms_norm_eps", 0.0, 1.0, config.rms_norm_eps);
  config.dtype = fields.text("dtype", fields.text("torch_dtype", ""));
  config.tied_output = fields.flag("tie_word_embeddings", false);
  parse_rope(fields, config);
  parse_tokens(fields, config);
  return config;
}

uint64_t LlamaConfig::longest_context() const {
  switch (rope_scaling.kind) {
    case RopeScaling::Kind::linear:
      return static_cast<uint64_t>(max_context * std::max(rope_scaling.factor, 1.0));
    case RopeScaling::Kind::llama3:
      return std::max<uint64_t>(
          max_context, static_cast<uint64_t>(rope_scaling.original_context * rope_scaling.factor));
    case RopeScaling::Kind::none: break;
  }
  return max_context;
}

LlamaConfig load_llama_config(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw std::runtime_error(path.string() + ": cannot be opened (a Llama folder needs it)");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return parse_llama_config(text, path.string());
}

}  // namespace keyhole::tools
