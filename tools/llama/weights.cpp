#include "tools/llama/weights.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

/// Takes tensors out of a checkpoint, and keeps what the model needs of it.
class Loader {
 public:
  Loader(Checkpoint& checkpoint, LlamaModel& model) : checkpoint_(checkpoint), model_(model) {}

  std::vector<float> vector(const std::string& name, size_t size) {
    return checkpoint_.take(name, {size}).to_f32();
  }

  /// The tensors one below the other as one matrix; all have `cols` columns.
  Matrix matrix(size_t cols, const std::vector<std::pair<std::string, size_t>>& names_and_rows) {
    Matrix matrix;
    matrix.cols = cols;
    for (const auto& [name, rows] : names_and_rows) {
      const StoredTensor& tensor = checkpoint_.take(name, {rows, cols});
      matrix.parts.push_back({rows, tensor.type, aligned(tensor)});
      matrix.rows += rows;
    }
    return matrix;
  }

 private:
  const std::byte* aligned(const StoredTensor& tensor) {
    const std::byte* const data = tensor.bytes.data();
    if (reinterpret_cast<uintptr_t>(data) % element_size(tensor.type) == 0) return data;
    model_.aligned.push_back(
        std::make_shared<std::vector<std::byte>>(tensor.bytes.begin(), tensor.bytes.end()));
    return model_.aligned.back()->data();
  }

  Checkpoint& checkpoint_;
  LlamaModel& model_;
};

/// How a family names its tensors.
class Names {
 public:
  /// Text models with pictures were written with two prefixes.
  Names(const Checkpoint& checkpoint, const LlamaConfig& config) {
    if (!config.has_pictures) return;
    for (const char* prefix : {"language_model.model.", "model.language_model."}) {
      if (checkpoint.contains(std::string(prefix) + "embed_tokens.weight")) model_ = prefix;
    }
    if (model_.starts_with("language_model.")) output_ = "language_model.lm_head.weight";
  }
  [[nodiscard]] std::string model(const std::string& rest) const { return model_ + rest; }
  [[nodiscard]] std::string layer(uint32_t layer) const {
    return model_ + "layers." + std::to_string(layer) + ".";
  }
  [[nodiscard]] const std::string& output() const { return output_; }

 private:
  std::string model_ = "model.";
  std::string output_ = "lm_head.weight";
};

using Rows = std::vector<std::pair<std::string, size_t>>;

/// The biases of the projections that `parts` names, one behind the other.
std::vector<float> biases(Loader& loader, const Rows& parts) {
  std::vector<float> all;
  for (const auto& [name, rows] : parts) {
    const std::vector<float> bias = loader.vector(name + ".bias", rows);
    all.insert(all.end(), bias.begin(), bias.end());
  }
  return all;
}

Matrix matrix(Loader& loader, size_t cols, const Rows& parts) {
  Rows tensors;
  for (const auto& [name, rows] : parts) tensors.emplace_back(name + ".weight", rows);
  return loader.matrix(cols, tensors);
}

LayerWeights load_layer(Loader& loader, const LlamaConfig& config, const std::string& prefix) {
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const size_t hidden = config.hidden_size;
  const size_t inner = config.intermediate_size;
  const auto norm = [&](const std::string& name, size_t size) {
    std::vector<float> weight = loader.vector(prefix + name + ".weight", size);
    if (config.norm_adds_one) {
      for (float& value : weight) value += 1.0F;
    }
    return weight;
  };
  const Rows qkv = config.fused_tensors
                       ? Rows{{attention + "qkv_proj", config.q_width() + 2 * config.kv_width()}}
                       : Rows{{attention + "q_proj", config.q_width()},
                              {attention + "k_proj", config.kv_width()},
                              {attention + "v_proj", config.kv_width()}};
  const Rows gate_up = config.fused_tensors
                           ? Rows{{mlp + "gate_up_proj", 2 * inner}}
                           : Rows{{mlp + "gate_proj", inner}, {mlp + "up_proj", inner}};
  const Rows output = {{attention + "o_proj", hidden}};
  const Rows down = {{mlp + "down_proj", hidden}};

  LayerWeights weights;
  weights.attention_norm = norm("input_layernorm", hidden);
  weights.qkv = matrix(loader, hidden, qkv);
  if (config.qkv_bias) weights.qkv_bias = biases(loader, qkv);
  if (config.head_norms) {
    weights.q_norm = norm("self_attn.q_norm", config.head_dim);
    weights.k_norm = norm("self_attn.k_norm", config.head_dim);
  }
  weights.output = matrix(loader, config.q_width(), output);
  if (config.output_bias) weights.output_bias = biases(loader, output);
  // Where attention's output has a norm of its own, that norm has the name which elsewhere is the MLP's.
  if (config.output_norms) {
    weights.output_norm = norm("post_attention_layernorm", hidden);
    weights.mlp_norm = norm("pre_feedforward_layernorm", hidden);
    weights.mlp_output_norm = norm("post_feedforward_layernorm", hidden);
  } else {
    weights.mlp_norm = norm("post_attention_layernorm", hidden);
  }
  weights.gate_up = matrix(loader, hidden, gate_up);
  weights.down = matrix(loader, inner, down);
  if (config.mlp_bias) {
    weights.gate_up_bias = biases(loader, gate_up);
    weights.down_bias = biases(loader, down);
  }
  return weights;
}

}  // namespace

bool stays_in_file(const std::string& name, const LlamaConfig& config) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;  // stored by old exporters
  if (config.tied_output && name.ends_with("lm_head.weight")) return true;
  return config.has_pictures && (name.find("vision_tower.") != std::string::npos ||
                                 name.find("multi_modal_projector.") != std::string::npos);
}

LlamaModel load_llama(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw std::runtime_error(folder.string() +
                             ": not a folder; --model wants a Hugging Face folder");
  }
  LlamaModel model;
  model.config = load_llama_config(folder / "config.json");
  const LlamaConfig& config = model.config;
  const auto checkpoint = std::make_shared<Checkpoint>(folder);
  Loader loader(*checkpoint, model);
  const Names names(*checkpoint, config);
  model.embedding =
      loader.matrix(config.hidden_size, {{names.model("embed_tokens.weight"), config.vocab_size}});
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    model.layers.push_back(load_layer(loader, config, names.layer(layer)));
  }
  model.final_norm = loader.vector(names.model("norm.weight"), config.hidden_size);
  if (config.norm_adds_one) {
    for (float& value : model.final_norm) value += 1.0F;
  }
  if (!config.tied_output) {
    model.lm_head = loader.matrix(config.hidden_size, {{names.output(), config.vocab_size}});
  }
  checkpoint->refuse_leftovers(
      [&](const std::string& name) { return stays_in_file(name, config); });
  model.files = checkpoint;
  return model;
}

}  // namespace keyhole::tools
