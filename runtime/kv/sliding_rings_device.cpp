// Rings on a device: what moves a layer's tokens there and back.
#include <algorithm>
#include <string>

#include "runtime/kv/sliding_rings.h"

namespace keyhole::runtime {

gpu::WindowsShape SlidingRings::windows_shape() const {
  const ModelShape& m = engine_->model();
  gpu::WindowsShape shape{m.q_heads, m.kv_heads, m.head_dim, m.kv_dtype, {}, {}};
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (!m.slides(layer)) continue;
    shape.layers.push_back({layer, at(layer).window, at(layer).slots, m.logits_of(layer)});
    if (m.layers_differ()) shape.shapes.push_back(m.of(layer));
    if (const float* sinks = m.sinks_of(layer); sinks != nullptr) {
      shape.sinks.insert(shape.sinks.end(), sinks, sinks + m.of(layer).q_heads);
    }
  }
  return shape;
}

uint64_t SlidingRings::device_bytes_to_come() const {
  const bool will =
      !rings_.empty() && windows_ == nullptr && engine_->device_has(gpu::DevicePart::windows);
  return will ? gpu::windows_bytes(windows_shape()) : 0;
}

gpu::Windows& SlidingRings::on_device(uint32_t layer) {
  if (windows_ != nullptr) return *windows_;
  if (!engine_->device_has(gpu::DevicePart::windows)) {
    throw Error(Status::unsupported,
                "layer " + std::to_string(layer) +
                    " has a sliding window, which lies in host memory with this device: its steps "
                    "take tensors there, and these lie in device memory");
  }
  windows_ = engine_->stream_device().make_windows(*others_, windows_shape());
  return *windows_;
}

SlidingRings::Kept SlidingRings::read_all(const Ring& ring) const {
  const uint32_t n = ring.tokens - ring.oldest;
  const size_t token = ring.token_bytes();
  Kept kept{ring.tokens, std::vector<std::byte>(n * token), std::vector<std::byte>(n * token)};
  if (n != 0) read_tokens(ring, ring.oldest, n, kept.k.data(), kept.v.data());
  if (!ring.on_device) return kept;
  const auto all_finite =
      engine_->kernels().all_finite[static_cast<size_t>(engine_->model().kv_dtype)];
  const size_t numbers = size_t{ring.shape.kv_heads} * ring.shape.head_dim;
  const auto is_finite = [&](uint32_t at, uint32_t count) {
    return all_finite(kept.k.data() + at * token, count * numbers) &&
           all_finite(kept.v.data() + at * token, count * numbers);
  };
  if (is_finite(0, n)) return kept;
  uint32_t good = 0;
  while (is_finite(good, 1)) ++good;
  kept.tokens = ring.oldest + good;
  kept.k.resize(good * token);
  kept.v.resize(good * token);
  if (good < std::min(kept.tokens, ring.window)) {
    throw Error(Status::not_finite, "a sliding layer was given a NaN or an infinity in K or V " +
                                        std::to_string(n - good) +
                                        " tokens ago, and keeps no window before it");
  }
  return kept;
}

void SlidingRings::move_to_device(uint32_t layer) {
  Ring& ring = at(layer);
  if (ring.on_device) return;
  gpu::Windows& windows = on_device(layer);
  const Kept kept = read_all(ring);
  windows.fill(place_of(ring), ring.oldest, ring.tokens - ring.oldest, kept.k.data(),
               kept.v.data());
  ring.on_device = true;
}

void SlidingRings::move_to_host(uint32_t layer) {
  Ring& ring = at(layer);
  if (!ring.on_device) return;
  const Kept kept = read_all(ring);
  ring.on_device = false;
  ring.tokens = ring.oldest;
  append(ring, kept.k.data(), kept.v.data(), kept.tokens - ring.oldest);
}

void SlidingRings::append_on_device(uint32_t layer, const TensorView& k, const TensorView& v,
                                    gpu::Stream stream) {
  Ring& ring = at(layer);
  const auto n = static_cast<uint32_t>(k.tokens);
  const uint32_t passed = first_kept(layer, n), coming = n - passed;
  const bool all_leave = coming == ring.slots;
  if (!all_leave) move_to_device(layer);
  const uint32_t kept =
      all_leave ? coming : std::min(ring.tokens - ring.oldest + coming, ring.slots);
  on_device(layer).append(place_of(ring), ring.tokens + passed, kept, k.slice(passed, coming),
                          v.slice(passed, coming), stream);
  ring.on_device = true;
  note_appended(layer, n);
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
