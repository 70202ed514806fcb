#include "runtime/engine/host_device.h"

#include <algorithm>
#include <cstring>

#include "cpu/attention.h"
#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
HostDevice::HostDevice(const gpu::ResidentShape& shape, const cpu::Kernels& kernels,
                       std::span<const LayerShape> layers)
    : shape_(shape), kernels_(&kernels), layers_(shape.layers), memory_(lay_out(layers)) {
  size_t numbers = 0, heads = 0;
  for (const Layer& l : layers_) {
    numbers = std::max(numbers, size_t{l.shape.q_heads} * l.shape.head_dim);
    heads = std::max<size_t>(heads, l.shape.q_heads);
  }
  o_.resize(numbers);
  lse_.resize(heads);
}

size_t HostDevice::lay_out(std::span<const LayerShape> layers) {
  constexpr const char* kWhat = "sink and window";
  const LayerShape all{shape_.q_heads, shape_.kv_heads, shape_.head_dim, shape_.head_dim};
  size_t bytes = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& l = layers_[i];
    l.shape = layers.empty() ? all : layers[i];
    l.row_bytes = l.shape.row_bytes(shape_.dtype);
    l.first_byte = bytes;
    bytes = checked_sum(bytes, checked_product({2, slots(), l.token_bytes()}, kWhat), kWhat);
  }
  return bytes;
}

std::byte* HostDevice::base(uint32_t layer, uint32_t kv_head, uint32_t which) const {
  const Layer& l = layers_[layer];
  return memory_.data() + l.first_byte + (size_t{kv_head} * 2 + which) * slots() * l.row_bytes;
}

void HostDevice::write_slot(uint32_t layer, uint32_t slot, const std::byte* k, const std::byte* v) {
  const size_t row = layers_[layer].row_bytes;
  for (uint32_t h = 0; h < layers_[layer].shape.kv_heads; ++h) {
    std::memcpy(base(layer, h, 0) + slot * row, k + h * row, row);
    std::memcpy(base(layer, h, 1) + slot * row, v + h * row, row);
  }
}

void HostDevice::read_slot(uint32_t layer, uint32_t slot, std::byte* k, std::byte* v) const {
  const size_t row = layers_[layer].row_bytes;
  for (uint32_t h = 0; h < layers_[layer].shape.kv_heads; ++h) {
    std::memcpy(k + h * row, base(layer, h, 0) + slot * row, row);
    std::memcpy(v + h * row, base(layer, h, 1) + slot * row, row);
  }
}

void HostDevice::append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  const size_t token = layers_[layer].token_bytes();
  for (uint32_t i = 0; i < n; ++i) {
    write_slot(layer, layers_[layer].sink++, k + i * token, v + i * token);
  }
}

void HostDevice::append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  const size_t token = layers_[layer].token_bytes();
  Layer& l = layers_[layer];
  for (uint32_t i = 0; i < n; ++i) {
    write_slot(layer, shape_.sink + l.window, k + i * token, v + i * token);
    ++l.window;
  }
}

void HostDevice::evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) {
  const size_t token = layers_[layer].token_bytes();
  Layer& l = layers_[layer];
  for (uint32_t i = 0; i < n; ++i) read_slot(layer, shape_.sink + i, k + i * token, v + i * token);
  l.window -= n;
  for (uint32_t h = 0; h < l.shape.kv_heads; ++h) {
    for (uint32_t which = 0; which < 2; ++which) {
      std::byte* window = base(layer, h, which) + shape_.sink * l.row_bytes;
      std::memmove(window, window + n * l.row_bytes, l.window * l.row_bytes);
    }
  }
}

void HostDevice::truncate(uint32_t layer, uint32_t sink, uint32_t window) {
  layers_[layer].sink = sink;
  layers_[layer].window = window;
}

void HostDevice::read(uint32_t layer, std::byte* k, std::byte* v) const {
  const size_t token = layers_[layer].token_bytes();
  const Layer& l = layers_[layer];
  for (uint32_t i = 0; i < l.sink + l.window; ++i) {
    read_slot(layer, i, k + i * token, v + i * token);
  }
}

void HostDevice::attend_begin(uint32_t layer, const float* q, gpu::Codes* /*it has none*/) {
  step_layer_ = layer;
  step_q_ = q;
}

KvPieces HostDevice::host_rows(uint32_t layer) { return {{all_rows(layer)}, 1}; }

void HostDevice::run_host_task(uint32_t kv_head) {
  const LayerShape& layer = layers_[step_layer_].shape;
  cpu::attend_range(*kernels_, contiguous_rows(step_layer_, kv_head),
                    step_q_ + size_t{kv_head} * layer.group() * layer.head_dim, layer.group(),
                    shape_.logits_of(step_layer_), host_state(kv_head));
}

KvView HostDevice::contiguous_rows(uint32_t layer, uint32_t kv_head) const {
  return all_rows(layer).head(kv_head);
}

KvView HostDevice::all_rows(uint32_t layer) const {
  const Layer& l = layers_[layer];
  // A window is begun only after the sink is full, so both are one range.
  const auto rows = [&](uint32_t which) {
    return RowsView{{.data = base(layer, 0, which),
                     .token_stride = l.shape.head_dim,
                     .head_stride = static_cast<ptrdiff_t>(2 * slots() * l.shape.head_dim),
                     .tokens = size_t{l.sink} + l.window,
                     .heads = l.shape.kv_heads,
                     .dim = l.shape.head_dim,
                     .dtype = shape_.dtype}};
  };
  return {rows(0), rows(1)};
}

StateView HostDevice::host_state(uint32_t kv_head) {
  const LayerShape& layer = layers_[step_layer_].shape;
  const size_t head = size_t{kv_head} * layer.group();
  return {o_.data() + head * layer.head_dim, lse_.data() + head};
}

void HostDevice::attend_end(StateView out) {
  const LayerShape& layer = layers_[step_layer_].shape;
  std::copy_n(o_.data(), size_t{layer.q_heads} * layer.head_dim, out.o);
  std::copy_n(lse_.data(), layer.q_heads, out.lse);
}

}  // namespace keyhole::runtime
