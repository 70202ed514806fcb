#include "tests/tools/llama/synthetic_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

#include "runtime/files/float16.h"
#include "tests/normal.h"

namespace keyhole::tools::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kPi = 3.14159265358979323846;

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // round to even
}

std::string encode(double value, ElementType type) {
  const auto x = static_cast<float>(value);
  char bytes[4];
  switch (type) {
    case ElementType::f32: std::memcpy(bytes, &x, 4); return {bytes, 4};
    case ElementType::bf16: {
      const uint16_t half = to_bf16(x);
      std::memcpy(bytes, &half, 2);
      return {bytes, 2};
    }
    case ElementType::f16: {
      const uint16_t half = f32_to_f16(x);
      std::memcpy(bytes, &half, 2);
      return {bytes, 2};
    }
    default: return std::string(element_size(type), '\0');
  }
}

double rounded(double value, ElementType type) {
  const auto x = static_cast<float>(value);
  if (type == ElementType::f16) return f16_to_f32(f32_to_f16(x));
  if (type != ElementType::bf16) return x;
  const uint32_t bits = static_cast<uint32_t>(to_bf16(x)) << 16;
  float back;
  std::memcpy(&back, &bits, sizeof(back));
  return back;
}

size_t head_dim(const json& config) {
  return config.contains("head_dim")
             ? config["head_dim"].get<size_t>()
             : config["hidden_size"].get<size_t>() / config["num_attention_heads"].get<size_t>();
}
size_t kv_heads(const json& config) {
  return config.value("num_key_value_heads", config["num_attention_heads"].get<size_t>());
}

using Vector = std::vector<double>;

Vector multiply(const SyntheticTensor& w, const Vector& x) {
  Vector y(w.shape[0], 0.0);
  for (size_t r = 0; r < w.shape[0]; ++r) {
    for (size_t c = 0; c < w.shape[1]; ++c) y[r] += w.values[r * w.shape[1] + c] * x[c];
  }
  return y;
}

Vector normalised(const SyntheticTensor& weight, const Vector& x, double eps) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  Vector y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + eps) * weight.values[i];
  }
  return y;
}

void rotate(const json& config, Vector& heads, size_t position) {
  const size_t d = head_dim(config);
  for (size_t start = 0; start < heads.size(); start += d) {
    for (size_t i = 0; i < d / 2; ++i) {
      const double angle = static_cast<double>(position) * reference_frequency(config, i);
      const double a = heads[start + i];
      const double b = heads[start + i + d / 2];
      heads[start + i] = a * std::cos(angle) - b * std::sin(angle);
      heads[start + i + d / 2] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
}

bool is_qwen3(const json& config) { return config["model_type"] == "qwen3"; }

/// Tokens that a layer's token attends to: all, or the last ones of a sliding window.
size_t window(const json& config, size_t layer) {
  const bool slides =
      config.contains("layer_types") && config["layer_types"][layer] == "sliding_attention";
  return slides ? config["sliding_window"].get<size_t>() : ~size_t{0};
}

/// Norm of each head.
void normalise_heads(const SyntheticTensor& weight, Vector& heads, double eps) {
  const size_t d = weight.values.size();
  for (size_t start = 0; start < heads.size(); start += d) {
    const auto begin = heads.begin() + static_cast<std::ptrdiff_t>(start);
    const Vector normed =
        normalised(weight, Vector(begin, begin + static_cast<std::ptrdiff_t>(d)), eps);
    std::copy(normed.begin(), normed.end(), begin);
  }
}

/// Attention of one token; keys and values of all tokens so far, `[token][Hkv * d]`.
Vector attend(const json& config, size_t layer, const Vector& q, const std::vector<Vector>& keys,
              const std::vector<Vector>& values) {
  const size_t d = head_dim(config);
  const size_t q_heads = config["num_attention_heads"];
  const size_t first = keys.size() - std::min(keys.size(), window(config, layer));
  Vector out(q.size(), 0.0);
  for (size_t head = 0; head < q_heads; ++head) {
    const size_t kv = head / (q_heads / kv_heads(config));
    Vector weights(keys.size());
    double sum = 0.0;
    for (size_t t = first; t < keys.size(); ++t) {
      double dot = 0.0;
      for (size_t i = 0; i < d; ++i) dot += q[head * d + i] * keys[t][kv * d + i];
      weights[t] = std::exp(dot / std::sqrt(static_cast<double>(d)));
      sum += weights[t];
    }
    for (size_t t = first; t < keys.size(); ++t) {
      for (size_t i = 0; i < d; ++i) out[head * d + i] += weights[t] / sum * values[t][kv * d + i];
    }
  }
  return out;
}

}  // namespace

json small_config() {
  return {{"model_type", "llama"},
          {"vocab_size", 37},
          {"hidden_size", 24},
          {"intermediate_size", 40},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 6},
          {"num_key_value_heads", 2},
          {"head_dim", 64},
          {"rope_theta", 10000.0},
          {"rms_norm_eps", 1e-5},
          {"max_position_embeddings", 512},
          {"bos_token_id", 0},
          {"eos_token_id", 1}};
}

json config_variant(const std::string& name) {
  json config = small_config();
  if (name == "tied") config["tie_word_embeddings"] = true;
  if (name == "multi_head") config.erase("num_key_value_heads");
  if (name == "one_kv_head") config["num_key_value_heads"] = 1;
  if (name == "wide_heads") config["head_dim"] = 128;
  if (name == "head_dim_80") config["head_dim"] = 80;
  if (name == "linear") config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 3.0}};
  if (name == "llama3") {
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", 8.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 64}};
  }
  if (name == "biases") config["attention_bias"] = true;
  if (name.starts_with("qwen3")) config["model_type"] = "qwen3";
  if (name == "qwen3_sliding" || name == "qwen3_all_sliding") {
    const bool all = name == "qwen3_all_sliding";
    config["use_sliding_window"] = true;
    config["sliding_window"] = 21;
    config["layer_types"] = {"sliding_attention", all ? "sliding_attention" : "full_attention",
                             "sliding_attention"};
  }
  return config;
}

SyntheticTensors random_weights(const json& config, ElementType type, uint64_t seed) {
  std::mt19937_64 random(seed);
  SyntheticTensors tensors;
  const auto add = [&](const std::string& name, std::vector<size_t> shape, double centre,
                       double spread) {
    keyhole::test::Normal<double> normal(centre, spread);
    SyntheticTensor tensor{std::move(shape), {}};
    size_t count = 1;
    for (const size_t extent : tensor.shape) count *= extent;
    for (size_t i = 0; i < count; ++i) tensor.values.push_back(rounded(normal(random), type));
    tensors[name] = std::move(tensor);
  };
  const size_t hidden = config["hidden_size"];
  const size_t inner = config["intermediate_size"];
  const size_t q_width = config["num_attention_heads"].get<size_t>() * head_dim(config);
  const size_t kv_width = kv_heads(config) * head_dim(config);
  add("model.embed_tokens.weight", {config["vocab_size"], hidden}, 0.0, 1.0);
  for (size_t layer = 0; layer < config["num_hidden_layers"]; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add(prefix + "input_layernorm.weight", {hidden}, 1.0, 0.2);
    add(prefix + "self_attn.q_proj.weight", {q_width, hidden}, 0.0, 0.3);
    add(prefix + "self_attn.k_proj.weight", {kv_width, hidden}, 0.0, 0.3);
    add(prefix + "self_attn.v_proj.weight", {kv_width, hidden}, 0.0, 0.3);
    add(prefix + "self_attn.o_proj.weight", {hidden, q_width}, 0.0, 0.1);
    add(prefix + "post_attention_layernorm.weight", {hidden}, 1.0, 0.2);
    add(prefix + "mlp.gate_proj.weight", {inner, hidden}, 0.0, 0.3);
    add(prefix + "mlp.up_proj.weight", {inner, hidden}, 0.0, 0.3);
    add(prefix + "mlp.down_proj.weight", {hidden, inner}, 0.0, 0.2);
    if (config.value("attention_bias", false)) {
      add(prefix + "self_attn.q_proj.bias", {q_width}, 0.0, 0.5);
      add(prefix + "self_attn.k_proj.bias", {kv_width}, 0.0, 0.5);
      add(prefix + "self_attn.v_proj.bias", {kv_width}, 0.0, 0.5);
      add(prefix + "self_attn.o_proj.bias", {hidden}, 0.0, 0.5);
    }
    if (is_qwen3(config)) {
      add(prefix + "self_attn.q_norm.weight", {head_dim(config)}, 1.0, 0.2);
      add(prefix + "self_attn.k_norm.weight", {head_dim(config)}, 1.0, 0.2);
    }
  }
  add("model.norm.weight", {hidden}, 1.0, 0.2);
  if (!config.value("tie_word_embeddings", false)) {
    add("lm_head.weight", {config["vocab_size"], hidden}, 0.0, 0.5);
  }
  return tensors;
}

void write_tensors(const fs::path& path, const SyntheticTensors& tensors, ElementType type) {
  std::vector<SafetensorsWriter::Declaration> layout;
  for (const auto& [name, tensor] : tensors) layout.push_back({name, type, tensor.shape});
  SafetensorsWriter writer(path, layout, {});
  for (const auto& [name, tensor] : tensors) {
    std::string bytes;
    for (const double value : tensor.values) bytes += encode(value, type);
    writer.write(std::as_bytes(std::span(bytes)));
  }
  writer.finish();
}

void write_model(const fs::path& folder, const json& config, const SyntheticTensors& tensors,
                 ElementType type, size_t shards) {
  write_file(folder / "config.json", config.dump());
  if (shards == 1) {
    write_tensors(folder / "model.safetensors", tensors, type);
    return;
  }
  std::vector<SyntheticTensors> parts(shards);
  json weight_map;
  size_t next = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t part = next++ % shards;
    parts[part][name] = tensor;
    weight_map[name] = "model-" + std::to_string(part) + ".safetensors";
  }
  for (size_t part = 0; part < shards; ++part) {
    write_tensors(folder / ("model-" + std::to_string(part) + ".safetensors"), parts[part], type);
  }
  write_file(folder / "model.safetensors.index.json", json{{"weight_map", weight_map}}.dump());
}

double reference_frequency(const json& config, size_t pair) {
  const double theta = config.value("rope_theta", 10000.0);
  const double frequency =
      1.0 / std::pow(theta, static_cast<double>(2 * pair) / static_cast<double>(head_dim(config)));
  if (!config.contains("rope_scaling") || config["rope_scaling"].is_null()) return frequency;
  const json& scaling = config["rope_scaling"];
  const double factor = scaling["factor"];
  if (scaling["rope_type"] == "linear") return frequency / factor;
  if (scaling["rope_type"] == "yarn") {
    // The pair that makes n turns within the original context L has the frequency 2 pi n / L.
    const double length = scaling["original_max_position_embeddings"];
    const auto pair_of = [&](double turns) {
      return -std::log(2 * kPi * turns / length) / std::log(theta) *
             static_cast<double>(head_dim(config)) / 2;
    };
    const double low = std::max(0.0, std::floor(pair_of(32.0)));
    const double high =
        std::min(static_cast<double>(head_dim(config)) - 1, std::ceil(pair_of(1.0)));
    const double slowed =
        std::min(1.0, std::max(0.0, (static_cast<double>(pair) - low) / (high - low)));
    return frequency * (1.0 - slowed) + frequency / factor * slowed;
  }
  // Llama 3.1: full turns within the original context decide; fewer than low: slowed down, more than
  // high: kept, between: interpolated linearly in the number of turns.
  const double turns =
      scaling["original_max_position_embeddings"].get<double>() * frequency / (2 * kPi);
  const double low = scaling["low_freq_factor"];
  const double high = scaling["high_freq_factor"];
  const double kept = std::min(1.0, std::max(0.0, (turns - low) / (high - low)));
  return frequency * (kept + (1.0 - kept) / factor);
}

std::vector<Vector> reference_logits(const json& config, const SyntheticTensors& tensors,
                                     const std::vector<uint32_t>& tokens) {
  const size_t hidden = config["hidden_size"];
  const size_t layers = config["num_hidden_layers"];
  const double eps = config["rms_norm_eps"];
  std::vector<std::vector<Vector>> keys(layers), values(layers);  // [layer][token]
  std::vector<Vector> logits;
  for (size_t position = 0; position < tokens.size(); ++position) {
    const double* row =
        tensors.at("model.embed_tokens.weight").values.data() + tokens[position] * hidden;
    Vector x(row, row + hidden);
    const auto add = [&](const Vector& update) {
      for (size_t i = 0; i < hidden; ++i) x[i] += update[i];
    };
    for (size_t layer = 0; layer < layers; ++layer) {
      const auto weight = [&](const std::string& name) -> const SyntheticTensor& {
        return tensors.at("model.layers." + std::to_string(layer) + "." + name + ".weight");
      };
      const auto project = [&](const std::string& name, const Vector& input) {
        Vector y = multiply(weight(name), input);
        const auto bias =
            tensors.find("model.layers." + std::to_string(layer) + "." + name + ".bias");
        if (bias == tensors.end()) return y;
        for (size_t i = 0; i < y.size(); ++i) y[i] += bias->second.values[i];
        return y;
      };
      const Vector normed = normalised(weight("input_layernorm"), x, eps);
      Vector q = project("self_attn.q_proj", normed);
      Vector k = project("self_attn.k_proj", normed);
      if (is_qwen3(config)) {
        normalise_heads(weight("self_attn.q_norm"), q, eps);
        normalise_heads(weight("self_attn.k_norm"), k, eps);
      }
      rotate(config, q, position);
      rotate(config, k, position);
      keys[layer].push_back(k);
      values[layer].push_back(project("self_attn.v_proj", normed));
      add(project("self_attn.o_proj", attend(config, layer, q, keys[layer], values[layer])));

      const Vector mlp_in = normalised(weight("post_attention_layernorm"), x, eps);
      const Vector gate = multiply(weight("mlp.gate_proj"), mlp_in);
      Vector inner = multiply(weight("mlp.up_proj"), mlp_in);
      for (size_t i = 0; i < inner.size(); ++i) inner[i] *= gate[i] / (1.0 + std::exp(-gate[i]));
      add(multiply(weight("mlp.down_proj"), inner));
    }
    const bool tied = config.value("tie_word_embeddings", false);
    logits.push_back(multiply(tensors.at(tied ? "model.embed_tokens.weight" : "lm_head.weight"),
                              normalised(tensors.at("model.norm.weight"), x, eps)));
  }
  return logits;
}

}  // namespace keyhole::tools::testing
