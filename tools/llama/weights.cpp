#include "tools/llama/weights.h"

#include <bit>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "runtime/files/safetensors.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;

std::string shape_text(const std::vector<size_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

/// All tensors of a folder, whether they lie in one file or in shards.
class Checkpoint {
 public:
  explicit Checkpoint(const fs::path& folder) : folder_(folder) {
    const fs::path single = folder / "model.safetensors";
    const fs::path index = folder / "model.safetensors.index.json";
    if (fs::exists(single)) {
      const SafetensorsFile& file = open("model.safetensors");
      for (const auto& entry : file.tensors()) home_[entry.first] = "model.safetensors";
    } else if (fs::exists(index)) {
      read_index(index);
    } else {
      throw std::runtime_error(
          folder.string() + ": holds neither model.safetensors nor model.safetensors.index.json");
    }
  }

  /// The tensor in fp32; its shape must be `shape`.
  std::vector<float> take(const std::string& name, const std::vector<size_t>& shape) {
    const auto home = home_.find(name);
    if (home == home_.end()) {
      throw std::runtime_error(folder_.string() + ": tensor " + name +
                               " is missing; needed: " + shape_text(shape));
    }
    const TensorView& tensor = open(home->second).tensor(name);
    const std::string where = (folder_ / home->second).string() + ": tensor " + name;
    if (tensor.shape != shape) {
      throw std::runtime_error(where + " has shape " + shape_text(tensor.shape) +
                               "; config.json asks for " + shape_text(shape));
    }
    if (tensor.type != ElementType::f32 && tensor.type != ElementType::f16 &&
        tensor.type != ElementType::bf16) {
      throw std::runtime_error(where + " has dtype " + element_name(tensor.type) +
                               "; allowed: F32, F16, BF16");
    }
    used_.insert(name);
    return tensor.to_f32();
  }

  /// Throws if a tensor of the files was not used.
  void refuse_leftovers(bool tied_output) const {
    for (const auto& [name, file] : home_) {
      if (used_.count(name) != 0) continue;
      // Stored by old exporters; both follow from what was read.
      if (name.ends_with("rotary_emb.inv_freq")) continue;
      if (tied_output && name == "lm_head.weight") continue;
      throw std::runtime_error((folder_ / file).string() + ": tensor " + name +
                               " has no place in a Llama of this config.json");
    }
  }

 private:
  const SafetensorsFile& open(const std::string& file) {
    auto& slot = files_[file];
    if (!slot) slot = std::make_unique<SafetensorsFile>(folder_ / file);
    return *slot;
  }

  void read_index(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const auto root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) {
      throw std::runtime_error(path.string() + ": no JSON object weight_map");
    }
    for (const auto& [name, shard] : root["weight_map"].items()) {
      // A plain file name: an index must not lead out of its folder.
      if (!shard.is_string() || shard.get<std::string>().empty() ||
          shard.get<std::string>().find_first_of("/\\") != std::string::npos) {
        throw std::runtime_error(path.string() + ": weight_map entry " + name + " is " +
                                 shard.dump() + "; allowed: the name of a file in the same folder");
      }
      home_[name] = shard.get<std::string>();
    }
  }

  fs::path folder_;
  std::map<std::string, std::string> home_;  // tensor -> file
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::set<std::string> used_;
};

/// The upper halves of all numbers if nothing is lost by it, else nothing.
std::vector<uint16_t> as_bf16(const std::vector<float>& numbers) {
  std::vector<uint16_t> halves(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(numbers[i]);
    if ((bits & 0xFFFF) != 0) return {};
    halves[i] = static_cast<uint16_t>(bits >> 16);
  }
  return halves;
}

/// The tensors one below the other as one matrix; all have `cols` columns.
Matrix stack(Checkpoint& checkpoint, size_t cols,
             const std::vector<std::pair<std::string, size_t>>& names_and_rows) {
  Matrix matrix;
  matrix.cols = cols;
  for (const auto& [name, rows] : names_and_rows) {
    std::vector<float> part = checkpoint.take(name, {rows, cols});
    if (matrix.data.empty()) {
      matrix.data = std::move(part);
    } else {
      matrix.data.insert(matrix.data.end(), part.begin(), part.end());
    }
    matrix.rows += rows;
  }
  matrix.bf16 = as_bf16(matrix.data);
  return matrix;
}

LayerWeights load_layer(Checkpoint& checkpoint, const LlamaConfig& config, uint32_t layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const size_t hidden = config.hidden_size;
  LayerWeights weights;
  weights.attention_norm = checkpoint.take(prefix + "input_layernorm.weight", {hidden});
  weights.qkv = stack(checkpoint, hidden,
                      {{attention + "q_proj.weight", config.q_width()},
                       {attention + "k_proj.weight", config.kv_width()},
                       {attention + "v_proj.weight", config.kv_width()}});
  weights.output = stack(checkpoint, config.q_width(), {{attention + "o_proj.weight", hidden}});
  weights.mlp_norm = checkpoint.take(prefix + "post_attention_layernorm.weight", {hidden});
  weights.gate_up = stack(checkpoint, hidden,
                          {{mlp + "gate_proj.weight", config.intermediate_size},
                           {mlp + "up_proj.weight", config.intermediate_size}});
  weights.down = stack(checkpoint, config.intermediate_size, {{mlp + "down_proj.weight", hidden}});
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
  Checkpoint checkpoint(folder);
  model.embedding =
      stack(checkpoint, config.hidden_size, {{"model.embed_tokens.weight", config.vocab_size}});
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    model.layers.push_back(load_layer(checkpoint, config, layer));
  }
  model.final_norm = checkpoint.take("model.norm.weight", {config.hidden_size});
  if (!config.tied_output) {
    model.lm_head = stack(checkpoint, config.hidden_size, {{"lm_head.weight", config.vocab_size}});
  }
  checkpoint.refuse_leftovers(config.tied_output);
  return model;
}

}  // namespace keyhole::tools
