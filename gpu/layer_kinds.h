// Layers of different shapes on a device: layers of one shape are a kind, whose parts on the device (resident tokens,
// codes, windows) are those of a model that has these layers alone. So kernels, arenas and strides know one shape, and
// what is counted for a session is the sum over its kinds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/layer_shape.h"
#include "gpu/codes.h"
#include "gpu/device.h"
#include "gpu/windows.h"

namespace keyhole::gpu {

/// Which kind each layer of a model is of.
class LayerKinds {
 public:
  struct Place {
    uint32_t kind = 0;
    uint32_t layer = 0;  ///< its number among the layers of the kind
  };

  /// shapes: `[layers]`; a layer without KV heads is of no kind.
  explicit LayerKinds(std::span<const LayerShape> shapes);

  [[nodiscard]] uint32_t count() const { return static_cast<uint32_t>(layers_.size()); }
  /// Layers of a kind in the model, rising numbers; at least one.
  [[nodiscard]] const std::vector<uint32_t>& layers(uint32_t kind) const { return layers_[kind]; }
  [[nodiscard]] bool has(uint32_t layer) const {
    return layer < places_.size() && places_[layer].kind < count();
  }
  /// Throws Error(invalid_argument) for a layer of no kind.
  [[nodiscard]] Place at(uint32_t layer) const {
    if (!has(layer)) refuse(layer);
    return places_[layer];
  }

 private:
  [[noreturn]] void refuse(uint32_t layer) const;

  std::vector<Place> places_;                  ///< [layer]
  std::vector<std::vector<uint32_t>> layers_;  ///< [kind]
};

// What a device makes for each kind of a shape: the shape itself where its layers are alike.
[[nodiscard]] std::vector<ResidentShape> parts_of(const ResidentShape& shape);
/// layers of a part is 0 where none of its layers has codes: nothing is made for it. sinks: memory for those of the
/// parts, which these point into.
[[nodiscard]] std::vector<CodesShape> parts_of(const CodesShape& shape, std::vector<float>& sinks);
[[nodiscard]] std::vector<WindowsShape> parts_of(const WindowsShape& shape);

/// `bytes(part)` of all parts of a shape of several kinds. Throws Error(invalid_argument) beyond 2^64 - 1.
template <class Shape, class Bytes>
[[nodiscard]] size_t sum_of_parts(const std::vector<Shape>& parts, const Bytes& bytes) {
  size_t sum = 0;
  for (const Shape& part : parts) {
    if (!__builtin_add_overflow(sum, bytes(part), &sum)) continue;
    throw Error(Status::invalid_argument,
                "layers of different shapes: the size in bytes exceeds 2^64 - 1");
  }
  return sum;
}

}  // namespace keyhole::gpu
