#include "runtime/engine/host_device.h"

#include <algorithm>
#include <cstring>

#include "cpu/attention.h"
#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

size_t memory_bytes(const gpu::ResidentShape& s) {
  return checked_product({2, s.layers, s.kv_heads, size_t{s.sink} + s.window_capacity, s.head_dim,
                          dtype_size(s.dtype)},
                         "sink and window");
}

}  // namespace

HostDevice::HostDevice(const gpu::ResidentShape& shape, const cpu::Kernels& kernels)
    : shape_(shape),
      kernels_(&kernels),
      row_bytes_(shape.head_dim * dtype_size(shape.dtype)),
      memory_(memory_bytes(shape)),
      layers_(shape.layers),
      o_(size_t{shape.q_heads} * shape.head_dim),
      lse_(shape.q_heads) {}

std::byte* HostDevice::base(uint32_t layer, uint32_t kv_head, uint32_t which) const {
  const size_t block = (size_t{layer} * shape_.kv_heads + kv_head) * 2 + which;
  return memory_.data() + block * slots() * row_bytes_;
}

void HostDevice::write_slot(uint32_t layer, uint32_t slot, const std::byte* k, const std::byte* v) {
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    std::memcpy(base(layer, h, 0) + slot * row_bytes_, k + h * row_bytes_, row_bytes_);
    std::memcpy(base(layer, h, 1) + slot * row_bytes_, v + h * row_bytes_, row_bytes_);
  }
}

void HostDevice::read_slot(uint32_t layer, uint32_t slot, std::byte* k, std::byte* v) const {
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    std::memcpy(k + h * row_bytes_, base(layer, h, 0) + slot * row_bytes_, row_bytes_);
    std::memcpy(v + h * row_bytes_, base(layer, h, 1) + slot * row_bytes_, row_bytes_);
  }
}

void HostDevice::append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  const size_t token = shape_.kv_heads * row_bytes_;
  for (uint32_t i = 0; i < n; ++i) {
    write_slot(layer, layers_[layer].sink++, k + i * token, v + i * token);
  }
}

void HostDevice::append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n) {
  const size_t token = shape_.kv_heads * row_bytes_;
  Layer& l = layers_[layer];
  for (uint32_t i = 0; i < n; ++i) {
    write_slot(layer, shape_.sink + l.window, k + i * token, v + i * token);
    ++l.window;
  }
}

void HostDevice::evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) {
  const size_t token = shape_.kv_heads * row_bytes_;
  Layer& l = layers_[layer];
  for (uint32_t i = 0; i < n; ++i) read_slot(layer, shape_.sink + i, k + i * token, v + i * token);
  l.window -= n;
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    for (uint32_t which = 0; which < 2; ++which) {
      std::byte* window = base(layer, h, which) + shape_.sink * row_bytes_;
      std::memmove(window, window + n * row_bytes_, l.window * row_bytes_);
    }
  }
}

void HostDevice::truncate(uint32_t layer, uint32_t sink, uint32_t window) {
  layers_[layer].sink = sink;
  layers_[layer].window = window;
}

void HostDevice::read(uint32_t layer, std::byte* k, std::byte* v) const {
  const size_t token = shape_.kv_heads * row_bytes_;
  const Layer& l = layers_[layer];
  for (uint32_t i = 0; i < l.sink + l.window; ++i) {
    read_slot(layer, i, k + i * token, v + i * token);
  }
}

void HostDevice::attend_begin(uint32_t layer, const float* q, gpu::Codes* /*it has none*/) {
  step_layer_ = layer;
  step_q_ = q;
}

gpu::ResidentRows HostDevice::host_rows(uint32_t layer, uint32_t kv_head) {
  return {{contiguous_rows(layer, kv_head)}, 1};
}

void HostDevice::run_host_task(uint32_t kv_head) {
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  const float* q = step_q_ + size_t{kv_head} * group * shape_.head_dim;
  StateView out{o_.data() + size_t{kv_head} * group * shape_.head_dim,
                lse_.data() + kv_head * group};
  cpu::attend_range(*kernels_, contiguous_rows(step_layer_, kv_head), q, group,
                    shape_.logits_of(step_layer_), out);
}

KvView HostDevice::contiguous_rows(uint32_t layer, uint32_t kv_head) const {
  const Layer& l = layers_[layer];
  // A window is begun only after the sink is full, so both are one range.
  const auto rows = [&](uint32_t which) {
    return RowsView{base(layer, kv_head, which), row_bytes_, size_t{l.sink} + l.window,
                    shape_.head_dim, shape_.dtype};
  };
  return {rows(0), rows(1)};
}

StateView HostDevice::host_state(uint32_t kv_head) {
  const size_t group = shape_.q_heads / shape_.kv_heads;
  return {o_.data() + kv_head * group * shape_.head_dim, lse_.data() + kv_head * group};
}

void HostDevice::attend_end(StateView out) {
  std::copy(o_.begin(), o_.end(), out.o);
  std::copy(lse_.begin(), lse_.end(), out.lse);
}

}  // namespace keyhole::runtime
