// What mixed_parts.h keeps of each kind of part: one for each shape of layers, found by the model's numbers of layers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/types.h"
#include "gpu/layer_kinds.h"

namespace keyhole::gpu {

/// Parts by the numbers of the model's layers.
template <class Part>
class Parts {
 public:
  explicit Parts(std::span<const LayerShape> shapes) : kinds(shapes), parts(kinds.count()) {}

  struct Found {
    Part* part;
    uint32_t layer;  ///< of the part
    uint32_t kind;
    Part* operator->() const { return part; }
  };
  [[nodiscard]] Found at(uint32_t layer) const {
    const LayerKinds::Place place = kinds.at(layer);
    return {parts[place.kind].get(), place.layer, place.kind};
  }
  template <class F>
  void for_each(const F& f) const {
    for (const auto& part : parts) {
      if (part != nullptr) f(*part);
    }
  }
  /// f(part, layers of it) for those that have some of these layers.
  template <class F>
  void for_layers(std::span<const uint32_t> layers, const F& f) const {
    for (uint32_t kind = 0; kind < parts.size(); ++kind) {
      std::vector<uint32_t> own;
      for (const uint32_t layer : layers) {
        const LayerKinds::Place place = kinds.at(layer);
        if (place.kind == kind) own.push_back(place.layer);
      }
      if (!own.empty()) f(*parts[kind], std::span<const uint32_t>(own));
    }
  }
  /// The first failure of a part since the last call.
  template <class F>
  [[nodiscard]] Status first_failure(const F& failure_of) const {
    for (const auto& part : parts) {
      if (const Status status = failure_of(*part); status != Status::ok) return status;
    }
    return Status::ok;
  }

  LayerKinds kinds;
  std::vector<std::unique_ptr<Part>> parts;  ///< [kind]
};

}  // namespace keyhole::gpu
