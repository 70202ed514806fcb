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
      const TensorView& tensor = checkpoint_.take(name, {rows, cols});
      matrix.parts.push_back({rows, tensor.type, aligned(tensor)});
      matrix.rows += rows;
    }
    return matrix;
  }

 private:
  const std::byte* aligned(const TensorView& tensor) {
    const std::byte* const data = tensor.bytes.data();
    if (reinterpret_cast<uintptr_t>(data) % element_size(tensor.type) == 0) return data;
    model_.aligned.push_back(
        std::make_shared<std::vector<std::byte>>(tensor.bytes.begin(), tensor.bytes.end()));
    return model_.aligned.back()->data();
  }

  Checkpoint& checkpoint_;
  LlamaModel& model_;
};

LayerWeights load_layer(Loader& loader, const LlamaConfig& config, uint32_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const size_t hidden = config.hidden_size;
  LayerWeights weights;
  weights.attention_norm = loader.vector(prefix + "input_layernorm.weight", hidden);
  weights.qkv = loader.matrix(hidden, {{attention + "q_proj.weight", config.q_width()},
                                       {attention + "k_proj.weight", config.kv_width()},
                                       {attention + "v_proj.weight", config.kv_width()}});
  weights.output = loader.matrix(config.q_width(), {{attention + "o_proj.weight", hidden}});
  weights.mlp_norm = loader.vector(prefix + "post_attention_layernorm.weight", hidden);
  weights.gate_up = loader.matrix(hidden, {{mlp + "gate_proj.weight", config.intermediate_size},
                                           {mlp + "up_proj.weight", config.intermediate_size}});
  weights.down = loader.matrix(config.intermediate_size, {{mlp + "down_proj.weight", hidden}});
  return weights;
}

}  // namespace

LlamaModel load_llama(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    throw std::runtime_error(folder.string() +
                             ": not a folder; --model wants a Hugging Face Llama folder");
  }
  LlamaModel model;
  model.config = load_llama_config(folder / "config.json");
  const LlamaConfig& config = model.config;
  const auto checkpoint = std::make_shared<Checkpoint>(folder);
  Loader loader(*checkpoint, model);
  model.embedding =
      loader.matrix(config.hidden_size, {{"model.embed_tokens.weight", config.vocab_size}});
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    model.layers.push_back(load_layer(loader, config, layer));
  }
  model.final_norm = loader.vector("model.norm.weight", config.hidden_size);
  if (!config.tied_output) {
    model.lm_head = loader.matrix(config.hidden_size, {{"lm_head.weight", config.vocab_size}});
  }
  checkpoint->refuse_leftovers([&](const std::string& name) {
    // Stored by old exporters; both follow from what was read.
    return name.ends_with("rotary_emb.inv_freq") ||
           (config.tied_output && name == "lm_head.weight");
  });
  model.files = checkpoint;
  return model;
}

}  // namespace keyhole::tools
