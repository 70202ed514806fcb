#include "gpu/layer_kinds.h"

#include <algorithm>

namespace keyhole::gpu {
namespace {

/// What shapes of parts have in common: heads, and the settings of their layers.
template <class Shape>
Shape part_of(const Shape& shape, const std::vector<uint32_t>& layers) {
  Shape part = shape;
  const LayerShape heads = shape.shapes[layers.front()];
  part.shapes.clear();
  part.layers = static_cast<uint32_t>(layers.size());
  part.q_heads = heads.q_heads;
  part.kv_heads = heads.kv_heads;
  part.layer_logits.clear();
  for (const uint32_t layer : layers) {
    if (!shape.layer_logits.empty()) part.layer_logits.push_back(shape.layer_logits[layer]);
  }
  return part;
}

/// The first query head of each layer, and the end.
std::vector<size_t> first_heads(std::span<const LayerShape> shapes) {
  std::vector<size_t> first{0};
  for (const LayerShape& s : shapes) first.push_back(first.back() + s.q_heads);
  return first;
}

}  // namespace

LayerKinds::LayerKinds(std::span<const LayerShape> shapes) : places_(shapes.size()) {
  std::vector<LayerShape> kinds;
  for (uint32_t layer = 0; layer < shapes.size(); ++layer) {
    const LayerShape& s = shapes[layer];
    const auto is_same = [&](const LayerShape& k) {
      return k.q_heads == s.q_heads && k.kv_heads == s.kv_heads && k.head_dim == s.head_dim;
    };
    Place& place = places_[layer];
    place.kind = UINT32_MAX;
    if (s.kv_heads == 0) continue;
    const auto at = std::find_if(kinds.begin(), kinds.end(), is_same);
    place.kind = static_cast<uint32_t>(at - kinds.begin());
    if (at == kinds.end()) {
      kinds.push_back(s);
      layers_.emplace_back();
    }
    place.layer = static_cast<uint32_t>(layers_[place.kind].size());
    layers_[place.kind].push_back(layer);
  }
}

void LayerKinds::refuse(uint32_t layer) const {
  throw Error(Status::invalid_argument,
              "layer " + std::to_string(layer) + ", which has nothing of this on the device");
}

std::vector<ResidentShape> parts_of(const ResidentShape& shape) {
  if (shape.shapes.empty()) return {shape};
  const LayerKinds kinds(shape.shapes);
  std::vector<ResidentShape> parts;
  for (uint32_t k = 0; k < kinds.count(); ++k) {
    parts.push_back(part_of(shape, kinds.layers(k)));
    parts.back().head_dim = shape.shapes[kinds.layers(k).front()].head_dim;
    parts.back().numbers = kinds.layers(k);
  }
  return parts;
}

std::vector<CodesShape> parts_of(const CodesShape& shape, std::vector<float>& sinks) {
  if (shape.shapes.empty()) return {shape};
  const LayerKinds kinds(shape.shapes);
  const std::vector<size_t> first = first_heads(shape.shapes);
  std::vector<CodesShape> parts;
  std::vector<size_t> own_sinks;
  for (uint32_t k = 0; k < kinds.count(); ++k) {
    CodesShape part = part_of(shape, kinds.layers(k));
    part.code.dim = shape.shapes[kinds.layers(k).front()].head_dim;
    part.coded.clear();
    part.coded_layers = 0;
    own_sinks.push_back(sinks.size());
    for (const uint32_t layer : kinds.layers(k)) {
      part.coded_layers += shape.coded[layer] != 0 ? 1 : 0;
      if (shape.sinks == nullptr) continue;
      sinks.insert(sinks.end(), shape.sinks + first[layer], shape.sinks + first[layer + 1]);
    }
    if (part.coded_layers == 0) part.layers = 0;
    parts.push_back(std::move(part));
  }
  for (size_t k = 0; k < parts.size(); ++k) {
    if (shape.sinks != nullptr) parts[k].sinks = sinks.data() + own_sinks[k];
  }
  return parts;
}

std::vector<WindowsShape> parts_of(const WindowsShape& shape) {
  if (shape.shapes.empty()) return {shape};
  const LayerKinds kinds(shape.shapes);
  const std::vector<size_t> first = first_heads(shape.shapes);
  std::vector<WindowsShape> parts;
  for (uint32_t k = 0; k < kinds.count(); ++k) {
    const LayerShape heads = shape.shapes[kinds.layers(k).front()];
    WindowsShape part{heads.q_heads, heads.kv_heads, heads.head_dim, shape.dtype, {}, {}};
    for (const uint32_t layer : kinds.layers(k)) {
      part.layers.push_back(shape.layers[layer]);
      if (shape.sinks.empty()) continue;
      const auto from = shape.sinks.begin();
      part.sinks.insert(part.sinks.end(), from + static_cast<ptrdiff_t>(first[layer]),
                        from + static_cast<ptrdiff_t>(first[layer + 1]));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace keyhole::gpu
