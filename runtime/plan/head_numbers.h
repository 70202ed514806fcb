// Numbers of the KV heads of all layers, counted through: the heads of a layer follow those of the layers before.
// Arrays of a session with an element for every head are in this order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace keyhole::runtime {

class HeadNumbers {
 public:
  /// Numbers of no heads.
  HeadNumbers() = default;
  HeadNumbers(uint32_t layers, uint32_t kv_heads) : layers_(layers), kv_heads_(kv_heads) {}
  /// Numbers of the heads of layers with different numbers of KV heads.
  explicit HeadNumbers(const std::vector<uint32_t>& kv_heads)
      : layers_(static_cast<uint32_t>(kv_heads.size())) {
    first_.reserve(kv_heads.size() + 1);
    first_.push_back(0);
    for (const uint32_t n : kv_heads) first_.push_back(first_.back() + n);
  }

  [[nodiscard]] uint32_t layers() const { return layers_; }
  [[nodiscard]] size_t count() const {
    return first_.empty() ? size_t{layers_} * kv_heads_ : first_.back();
  }
  /// The number of KV heads of a layer.
  [[nodiscard]] uint32_t of(uint32_t layer) const {
    return first_.empty() ? kv_heads_ : static_cast<uint32_t>(first_[layer + 1] - first_[layer]);
  }
  [[nodiscard]] size_t at(uint32_t layer, uint32_t kv_head) const {
    return (first_.empty() ? size_t{layer} * kv_heads_ : first_[layer]) + kv_head;
  }
  /// The layer of the head that at() gave `number`.
  [[nodiscard]] uint32_t layer_of(size_t number) const {
    if (first_.empty()) return static_cast<uint32_t>(number / kv_heads_);
    const auto next = std::upper_bound(first_.begin(), first_.end(), number);
    return static_cast<uint32_t>(next - first_.begin()) - 1;
  }

 private:
  uint32_t layers_ = 0, kv_heads_ = 0;
  std::vector<size_t>
      first_;  ///< `[layers + 1]` the first of each layer; empty: all have kv_heads_
};

}  // namespace keyhole::runtime
