// Rings on a device: what moves a layer's tokens there and back.
#include <algorithm>
#include <string>

#include "runtime/session/sliding_rings.h"

namespace keyhole::runtime {

gpu::WindowsShape SlidingRings::windows_shape() const {
  const ModelShape& m = engine_->model();
  gpu::WindowsShape shape{m.q_heads, m.kv_heads, m.head_dim, m.kv_dtype, {}, {}};
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (!m.slides(layer)) continue;
    shape.layers.push_back({layer, at(layer).window, at(layer).slots, m.logits_of(layer)});
    if (const float* sinks = m.sinks_of(layer); sinks != nullptr) {
      shape.sinks.insert(shape.sinks.end(), sinks, sinks + m.q_heads);
    }
  }
  return shape;
}

uint64_t SlidingRings::device_bytes_to_come() const {
  const bool will = !rings_.empty() && windows_ == nullptr && engine_->stream_device().make_windows;
  return will ? gpu::windows_bytes(windows_shape()) : 0;
}

gpu::Windows& SlidingRings::on_device(uint32_t layer) {
  if (windows_ != nullptr) return *windows_;
  const auto& make = engine_->stream_device().make_windows;
  if (!make) {
    throw Error(Status::unsupported,
                "layer " + std::to_string(layer) +
                    " has a sliding window, which lies in host memory with this device: its steps "
                    "take tensors there, and these lie in device memory");
  }
  windows_ = make(*others_, windows_shape());
  return *windows_;
}

std::array<std::vector<std::byte>, 2> SlidingRings::read_all(const Ring& ring) const {
  const uint32_t n = ring.tokens - ring.oldest;
  std::vector<std::byte> k(n * kv_heads_ * row_bytes_), v(k.size());
  if (n != 0) read_tokens(ring, ring.oldest, n, k.data(), v.data());
  if (ring.on_device) {
    const auto dtype = static_cast<size_t>(engine_->model().kv_dtype);
    for (const auto* rows : {&k, &v}) {
      if (engine_->kernels().all_finite[dtype](rows->data(), size_t{n} * kv_heads_ * head_dim_)) {
        continue;
      }
      throw Error(Status::not_finite,
                  "a sliding layer has a NaN or an infinity in K or V, from a step on the device");
    }
  }
  return {std::move(k), std::move(v)};
}

void SlidingRings::move_to_device(uint32_t layer) {
  Ring& ring = at(layer);
  if (ring.on_device) return;
  gpu::Windows& windows = on_device(layer);
  const auto [k, v] = read_all(ring);
  windows.fill(place_of(ring), ring.oldest, ring.tokens - ring.oldest, k.data(), v.data());
  ring.on_device = true;
}

void SlidingRings::move_to_host(uint32_t layer) {
  Ring& ring = at(layer);
  if (!ring.on_device) return;
  const auto [k, v] = read_all(ring);
  const uint32_t n = ring.tokens - ring.oldest;
  ring.on_device = false;
  ring.tokens = ring.oldest;
  append(ring, k.data(), v.data(), n);
}

void SlidingRings::note_appended(uint32_t layer, uint32_t n) {
  Ring& ring = at(layer);
  ring.tokens += n;
  if (ring.tokens - ring.oldest > ring.slots) ring.oldest = ring.tokens - ring.slots;
}

Status SlidingRings::failure(std::string& text) {
  return windows_ == nullptr ? Status::ok : windows_->failure(text);
}

}  // namespace keyhole::runtime
