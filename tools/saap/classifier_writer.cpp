#include "tools/saap/classifier_writer.h"

#include <cmath>
#include <stdexcept>

#include "runtime/files/element.h"
#include "tools/io/trace_format.h"

namespace keyhole::tools {
namespace {

constexpr const char* kVersion = "1";
constexpr float kLargestF16 = 65504.0F;

struct Part {
  const char* name;
  ElementType type;
  std::vector<size_t> shape;
  const std::vector<float>& data;
};

std::vector<Part> parts_of(const SaapHead& head) {
  const auto [d, h, c] = head.mlp.shape;
  return {{"centroids", ElementType::f32, {c, d}, head.partitions.centroids},
          {"offsets", ElementType::f32, {c}, head.partitions.offsets},
          {"w1", ElementType::f16, {h, d}, head.mlp.w1},
          {"b1", ElementType::f32, {h}, head.mlp.b1},
          {"w2", ElementType::f16, {c, h}, head.mlp.w2},
          {"b2", ElementType::f32, {c}, head.mlp.b2},
          {"w3", ElementType::f16, {c, d}, head.mlp.w3}};
}

std::map<std::string, std::string> metadata_of(const TraceInfo& info, const MlpShape& shape) {
  std::map<std::string, std::string> out = {{"keyhole_classifiers", kVersion},
                                            {"partitions", std::to_string(shape.outputs)},
                                            {"hidden", std::to_string(shape.hidden)}};
  for (const auto& [key, value] : to_metadata(info)) {
    if (key == "q_heads" || key == "kv_heads" || key == "head_dim" || key == "model" ||
        key.starts_with("rope_")) {
      out.emplace(key, value);
    }
  }
  return out;
}

}  // namespace

void write_classifiers(const std::filesystem::path& path, const TraceInfo& info,
                       const std::vector<SaapHead>& heads) {
  if (heads.empty()) throw std::runtime_error(path.string() + ": there is no head to write");
  std::vector<SafetensorsWriter::Declaration> layout;
  for (const SaapHead& head : heads) {
    for (const Part& part : parts_of(head)) {
      const std::string name = trace_tensor_name(head.layer, head.kv_head, part.name);
      for (const float x : part.data) {
        if (!(std::abs(x) <= (part.type == ElementType::f16 ? kLargestF16 : 1e30F))) {
          throw std::runtime_error("\"" + name + "\" holds " + std::to_string(x) +
                                   ": training has diverged; a smaller --lr may help");
        }
      }
      layout.push_back({name, part.type, part.shape});
    }
  }
  SafetensorsWriter file(path, layout, metadata_of(info, heads.front().mlp.shape));
  std::vector<std::byte> bytes;
  for (const SaapHead& head : heads) {
    for (const Part& part : parts_of(head)) {
      bytes.resize(part.data.size() * element_size(part.type));
      elements_from_f32(part.type, part.data, bytes);
      file.write(bytes);
    }
  }
  file.finish();
}

}  // namespace keyhole::tools
