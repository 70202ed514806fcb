#include "tools/llama/checkpoint.h"

#include <fstream>
#include <iterator>
#include <stdexcept>

#include "runtime/files/element.h"
#include "runtime/files/json.h"

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

}  // namespace

Checkpoint::Checkpoint(const fs::path& folder) : folder_(folder) {
  const fs::path index = folder / "model.safetensors.index.json";
  if (fs::exists(folder / "model.safetensors")) {
    add_file("model.safetensors");
    for (const auto& entry : files_.at("model.safetensors")->tensors()) {
      home_[entry.first] = "model.safetensors";
    }
  } else if (fs::exists(index)) {
    read_index(index);
  } else {
    throw std::runtime_error(folder.string() +
                             ": holds neither model.safetensors nor model.safetensors.index.json");
  }
}

const StoredTensor& Checkpoint::take(const std::string& name, const std::vector<size_t>& shape) {
  const auto home = home_.find(name);
  if (home == home_.end()) {
    throw std::runtime_error(folder_.string() + ": tensor " + name +
                             " is missing; needed: " + shape_text(shape));
  }
  const StoredTensor& tensor = files_.at(home->second)->tensor(name);
  const std::string where = (folder_ / home->second).string() + ": tensor " + name;
  if (tensor.shape != shape) {
    throw std::runtime_error(where + " has shape " + shape_text(tensor.shape) +
                             "; config.json asks for " + shape_text(shape));
  }
  if (!is_floating(tensor.type)) {
    throw std::runtime_error(where + " has dtype " + element_name(tensor.type) +
                             "; allowed: F32, F16, BF16");
  }
  taken_.insert(name);
  return tensor;
}

void Checkpoint::refuse(const std::string& tensor, const std::string& file) const {
  throw std::runtime_error((folder_ / file).string() + ": tensor " + tensor +
                           " has no place in a model of this config.json");
}

void Checkpoint::add_file(const std::string& name) {
  files_[name] = std::make_unique<SafetensorsFile>(folder_ / name);
}

void Checkpoint::read_index(const fs::path& path) {
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
    const std::string home = shard.get<std::string>();
    if (files_.count(home) == 0) {
      if (!fs::exists(folder_ / home)) {
        throw std::runtime_error((folder_ / home).string() + ": this shard is missing; " +
                                 path.filename().string() + " names it for " + name);
      }
      add_file(home);
    }
    if (!files_.at(home)->contains(name)) {
      throw std::runtime_error(path.string() + ": weight_map says that tensor " + name +
                               " lies in " + home + ", which does not hold it");
    }
    home_[name] = home;
  }
  // Tensors that the index does not name would be left out silently.
  for (const auto& [shard, open] : files_) {
    for (const auto& entry : open->tensors()) {
      const auto home = home_.find(entry.first);
      if (home == home_.end() || home->second != shard) {
        throw std::runtime_error(path.string() + ": weight_map does not name tensor " +
                                 entry.first + ", which lies in " + shard);
      }
    }
  }
}

}  // namespace keyhole::tools
