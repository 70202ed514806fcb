#include "runtime/engine/classifier_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>

#include "runtime/files/input_file.h"
#include "runtime/files/safetensors.h"

namespace keyhole::runtime {
namespace {

constexpr uint32_t kVersion = 1;

[[noreturn]] void corrupt(const std::string& what) { throw Error(Status::corrupt, what); }
[[noreturn]] void foreign(const std::string& what) { throw Error(Status::invalid_argument, what); }

/// One file being read.
class File {
 public:
  File(const SafetensorsReader& file, const ModelShape& model) : file_(file), model_(model) {}

  void check_version() const {
    if (file_.metadata().count("keyhole_classifiers") == 0) {
      corrupt("it is not a classifier file: its metadata lack \"keyhole_classifiers\"");
    }
    const auto version = number<uint32_t>("keyhole_classifiers");
    if (version != kVersion) {
      throw Error(Status::version, "it has format " + std::to_string(version) +
                                       "; this library reads format " + std::to_string(kVersion));
    }
  }

  void check_model(const index::RopeParams& rope) {
    require_equal("q_heads", model_.q_heads);
    require_equal("kv_heads", model_.kv_heads);
    require_equal("head_dim", model_.head_dim);
    // Partitions are of keys before RoPE: undoing another one gives other keys.
    const auto theta = number<float>("rope_theta");
    const bool scaled = text("rope_scaling") != "none" && theta != 0.0F;
    if (theta != rope.theta || scaled == rope.inv_freq_scale.empty()) {
      foreign("it is of a model with rope_theta " + text("rope_theta") + " and scaling " +
              text("rope_scaling") + ", the engine's is " + std::to_string(rope.theta) +
              (rope.inv_freq_scale.empty() ? " without scaling" : " with scaling"));
    }
    if (rope.interleaved && theta != 0.0F) {
      foreign("it is of a model whose RoPE turns components i and i + rope_dim / 2, the engine's " +
              std::string("has rope_interleaved"));
    }
    partitions_ = number<uint32_t>("partitions");
    hidden_ = number<uint32_t>("hidden");
  }

  /// Null where the head is absent.
  [[nodiscard]] std::unique_ptr<index::QueryClassifier> head(uint32_t layer, uint32_t kv_head,
                                                             const cpu::Kernels& kernels) {
    prefix_ = "layer." + std::to_string(layer) + ".kv." + std::to_string(kv_head) + ".";
    if (file_.tensors().count(prefix_ + "centroids") == 0) return nullptr;
    const size_t d = model_.head_dim;
    const size_t c = partitions_;
    const size_t h = hidden_;
    index::ClassifierWeights w;
    w.dim = model_.head_dim;
    w.hidden = hidden_;
    w.partitions.centroids = tensor<float>("centroids", {c, d});
    w.partitions.bonuses = tensor<float>("offsets", {c});
    w.w1 = tensor<uint16_t>("w1", {h, d});
    w.b1 = tensor<float>("b1", {h});
    w.w2 = tensor<uint16_t>("w2", {c, h});
    w.b2 = tensor<float>("b2", {c});
    w.w3 = tensor<uint16_t>("w3", {c, d});
    try {
      return std::make_unique<index::QueryClassifier>(kernels, std::move(w));
    } catch (const Error& e) {
      corrupt(prefix_ + "*: " + e.what());
    }
  }

  [[nodiscard]] size_t tensors_read() const { return tensors_read_; }

 private:
  [[nodiscard]] const std::string& text(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) corrupt("its metadata lack \"" + key + "\"");
    return found->second;
  }

  template <class Number>
  [[nodiscard]] Number number(const std::string& key) const {
    const std::string& value = text(key);
    Number out{};
    const char* end = value.data() + value.size();
    const auto [rest, error] = std::from_chars(value.data(), end, out);
    if (error != std::errc() || rest != end) {
      corrupt("its metadata's \"" + key + "\" is \"" + value.substr(0, 40) +
              "\", which is not a number of its kind");
    }
    return out;
  }

  void require_equal(const char* key, uint32_t needed) const {
    const auto seen = number<uint32_t>(key);
    if (seen != needed) {
      foreign("it is of a model with " + std::string(key) + " " + std::to_string(seen) +
              ", the engine has " + std::to_string(needed));
    }
  }

  template <class Element>
  [[nodiscard]] std::vector<Element> tensor(const char* name, const std::vector<size_t>& shape) {
    const auto found = file_.tensors().find(prefix_ + name);
    if (found == file_.tensors().end()) corrupt("there is no tensor \"" + prefix_ + name + "\"");
    const TensorEntry& entry = found->second;
    constexpr ElementType kType = sizeof(Element) == 2 ? ElementType::f16 : ElementType::f32;
    if (entry.type != kType || entry.shape != shape) {
      corrupt("tensor \"" + prefix_ + name + "\" has another type or shape than the metadata say");
    }
    ++tensors_read_;
    std::vector<Element> out(entry.bytes / sizeof(Element));
    file_.read(entry, std::as_writable_bytes(std::span(out)));
    return out;
  }

  const SafetensorsReader& file_;
  const ModelShape& model_;
  uint32_t partitions_ = 0, hidden_ = 0;
  std::string prefix_;
  size_t tensors_read_ = 0;
};

}  // namespace

Classifiers::Classifiers(const std::string& path, const ModelShape& model,
                         std::span<const index::RopeParams> ropes, const cpu::Kernels& kernels)
    : kv_heads_(model.kv_heads), heads_(size_t{model.layers} * model.kv_heads) {
  const auto refuse = [&](Status status, const char* what) {
    const std::string text = what;
    throw Error(status, text.starts_with(path) ? text : path + ": " + text);
  };
  if (model.layers_differ()) {
    refuse(
        Status::unsupported,
        "classifiers are of models whose layers have the same heads; those of the engine differ");
  }
  try {
    const SafetensorsReader tensors(path);
    File file(tensors, model);
    file.check_version();
    size_t first = 0;
    while (first + 1 < ropes.size() && model.slides(static_cast<uint32_t>(first))) ++first;
    file.check_model(ropes[first]);
    for (uint32_t layer = 0; layer < model.layers; ++layer) {
      for (uint32_t h = 0; h < model.kv_heads; ++h) {
        heads_[size_t{layer} * kv_heads_ + h] = file.head(layer, h, kernels);
      }
    }
    if (file.tensors_read() != tensors.tensors().size()) {
      foreign("it holds tensors of other heads than those of an engine with " +
              std::to_string(model.layers) + " layers");
    }
  } catch (const Error& e) {
    refuse(e.status(), e.what());
  } catch (const CannotRead& e) {
    refuse(Status::io, e.what());
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    refuse(Status::corrupt, e.what());
  }
}

size_t Classifiers::count() const {
  return static_cast<size_t>(
      std::count_if(heads_.begin(), heads_.end(), [](const auto& h) { return h != nullptr; }));
}

}  // namespace keyhole::runtime
