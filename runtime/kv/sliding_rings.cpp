#include "runtime/kv/sliding_rings.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "cpu/attention.h"
#include "runtime/engine/sizes.h"

namespace keyhole::runtime {

SlidingRings::SlidingRings(const Engine& engine, uint32_t max_tokens, gpu::Resident& others)
    : engine_(&engine), others_(&others), max_tokens_(max_tokens), places_(engine.model().layers) {
  const ModelShape& m = engine.model();
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    if (!m.slides(layer)) continue;
    places_[layer] = static_cast<uint32_t>(rings_.size());
    const Window& window = m.windows[layer];
    const uint32_t slots = window.slots(max_tokens);
    const LayerShape shape = m.of(layer);
    const size_t row = shape.row_bytes(m.kv_dtype);
    const size_t bytes = checked_product({2, shape.kv_heads, slots, row}, "a sliding window");
    rings_.push_back({cpu::ReservedBuffer(bytes), window.tokens, slots, shape, row});
  }
  if (rings_.empty()) return;
  o_.resize(m.most([](const LayerShape& s) { return size_t{s.q_heads} * s.head_dim; }));
  piece_o_.resize(o_.size());
  lse_.resize(m.largest().q_heads);
  piece_lse_.resize(lse_.size());
}

std::byte* SlidingRings::slot(const Ring& ring, uint32_t kv_head, uint32_t which,
                              uint32_t slot) const {
  const size_t row = (size_t{which} * ring.shape.kv_heads + kv_head) * ring.slots + slot;
  return ring.memory.data() + row * ring.row_bytes;
}

// ---- Tokens come and go ---------------------------------------------------------------------------

void SlidingRings::append(Ring& ring, const std::byte* k, const std::byte* v, uint32_t n) {
  const size_t row = ring.row_bytes, token = ring.token_bytes();
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t to = ring.tokens % ring.slots;
    for (uint32_t h = 0; h < ring.shape.kv_heads; ++h) {
      std::memcpy(slot(ring, h, 0, to), k + i * token + h * row, row);
      std::memcpy(slot(ring, h, 1, to), v + i * token + h * row, row);
    }
    ring.touched = std::max(ring.touched, to + 1);
    ring.tokens += 1;
    if (ring.tokens - ring.oldest > ring.slots) ring.oldest = ring.tokens - ring.slots;
  }
}

void SlidingRings::append_window(uint32_t layer, const std::byte* k, const std::byte* v,
                                 uint32_t n) {
  move_to_host(layer);
  append(at(layer), k, v, n);
}

uint32_t SlidingRings::first_kept(uint32_t layer, uint32_t n) const {
  return n > at(layer).slots ? n - at(layer).slots : 0;
}

void SlidingRings::skip(uint32_t layer, uint32_t n) {
  if (n == 0) return;
  Ring& ring = at(layer);
  ring.on_device = false;  // all that lies there leaves
  ring.tokens += n;
  ring.oldest = ring.tokens;
}

bool SlidingRings::can_truncate(uint32_t layer, uint32_t tokens) const {
  const Ring& ring = at(layer);
  if (tokens == 0 || tokens >= ring.tokens || ring.oldest == 0) return true;
  return tokens >= least_truncation(layer);
}

uint32_t SlidingRings::least_truncation(uint32_t layer) const {
  const Ring& ring = at(layer);
  return ring.oldest == 0 ? 1 : ring.oldest + ring.window;
}

void SlidingRings::truncate_to(uint32_t layer, uint32_t tokens) {
  Ring& ring = at(layer);
  const uint32_t left = std::min(ring.tokens, tokens);
  const uint32_t oldest = tokens == 0 ? 0 : ring.oldest;
  if (ring.on_device) windows_->keep(place_of(ring), oldest, left - oldest);
  ring.tokens = left;
  ring.oldest = oldest;
}

uint32_t SlidingRings::window_count(uint32_t layer) const {
  const Ring& ring = at(layer);
  return std::min(ring.tokens - ring.oldest, ring.window);
}

namespace {

[[noreturn]] void not_of_a_ring(const char* call) {
  throw Error(Status::internal, std::string(call) + " of a sliding layer");
}

}  // namespace

void SlidingRings::append_sink(uint32_t, const std::byte*, const std::byte*, uint32_t) {
  not_of_a_ring("append_sink");
}
void SlidingRings::evict(uint32_t, std::byte*, std::byte*, uint32_t) { not_of_a_ring("evict"); }
void SlidingRings::truncate(uint32_t, uint32_t, uint32_t) { not_of_a_ring("truncate"); }

uint64_t SlidingRings::bytes() const {
  uint64_t bytes = 0;
  for (const Ring& ring : rings_) bytes += uint64_t{2} * ring.touched * ring.token_bytes();
  return bytes;
}

uint64_t SlidingRings::more_bytes(uint32_t layer, uint32_t n) const {
  const Ring& ring = at(layer);
  uint64_t more = std::min(n, ring.slots - ring.touched);
  if (ring.on_device) {  // those there come back first
    const uint64_t all = std::min<uint64_t>(uint64_t{ring.tokens} + n, ring.slots);
    more = all - std::min<uint64_t>(all, ring.touched);
  }
  return 2 * more * ring.token_bytes();
}

// ---- Attention ------------------------------------------------------------------------------------

void SlidingRings::attend_begin(uint32_t layer, const float* q, gpu::Codes* /*it has none*/) {
  move_to_host(layer);
  step_layer_ = layer;
  step_q_ = q;
  step_ahead_ = std::exchange(ahead_, 0);
}

void SlidingRings::run_host_task(uint32_t kv_head) {
  const Ring& ring = at(step_layer_);
  const uint32_t group = ring.shape.group(), dim = ring.shape.head_dim;
  const size_t head = size_t{kv_head} * group;
  const std::array<StateView, 2> states{
      StateView{o_.data() + head * dim, lse_.data() + head},
      StateView{piece_o_.data() + head * dim, piece_lse_.data() + head}};
  const uint32_t n =
      std::min(window_count(step_layer_), ring.window - std::min(ring.window, step_ahead_));
  if (n == 0) return cpu::clear_state(states[0], group, dim);
  const uint32_t first = (ring.tokens - n) % ring.slots;
  const uint32_t straight = std::min(n, ring.slots - first);
  const auto attend = [&](uint32_t from, uint32_t count, StateView out) {
    const auto rows = [&](uint32_t which) {
      return dense_rows(slot(ring, kv_head, which, from), count, dim, engine_->model().kv_dtype);
    };
    cpu::attend_range(engine_->kernels(), {rows(0), rows(1)}, step_q_ + head * dim, group,
                      engine_->model().logits_of(step_layer_), out);
  };
  attend(first, straight, states[0]);
  if (straight == n) return;
  attend(0, n - straight, states[1]);
  cpu::merge_states(states, group, dim, states[0]);
}

StateView SlidingRings::host_state(uint32_t kv_head) {
  const LayerShape& shape = at(step_layer_).shape;
  const size_t head = size_t{kv_head} * shape.group();
  return {o_.data() + head * shape.head_dim, lse_.data() + head};
}

void SlidingRings::attend_end(StateView out) {
  const LayerShape& shape = at(step_layer_).shape;
  std::copy_n(o_.data(), size_t{shape.q_heads} * shape.head_dim, out.o);
  std::copy_n(lse_.data(), shape.q_heads, out.lse);
}

void SlidingRings::read_tokens(const Ring& ring, uint32_t first, uint32_t n, std::byte* k,
                               std::byte* v) const {
  if (ring.on_device) return windows_->read(place_of(ring), first, n, k, v);
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t h = 0; h < ring.shape.kv_heads; ++h) {
      const size_t to = (size_t{i} * ring.shape.kv_heads + h) * ring.row_bytes;
      std::memcpy(k + to, slot(ring, h, 0, (first + i) % ring.slots), ring.row_bytes);
      std::memcpy(v + to, slot(ring, h, 1, (first + i) % ring.slots), ring.row_bytes);
    }
  }
}

void SlidingRings::read(uint32_t layer, std::byte* k, std::byte* v) const {
  const uint32_t n = window_count(layer);
  read_tokens(at(layer), at(layer).tokens - n, n, k, v);
}

// ---- Copies ---------------------------------------------------------------------------------------

void SlidingRings::copy_from(const SlidingRings& from) {
  for (size_t i = 0; i < rings_.size(); ++i) {
    const Ring& ring = from.rings_[i];
    const Kept kept = from.read_all(ring);
    rings_[i].tokens = rings_[i].oldest = ring.oldest;
    append(rings_[i], kept.k.data(), kept.v.data(), kept.tokens - ring.oldest);
  }
}

void SlidingRings::save(ChecksumWriter& out) const {
  for (const Ring& ring : rings_) {
    const Kept kept = read_all(ring);
    out.value(kept.tokens);
    out.value(kept.tokens - ring.oldest);
    out.bytes(kept.k.data(), kept.k.size());
    out.bytes(kept.v.data(), kept.v.size());
  }
}

void SlidingRings::load(ChecksumReader& in) {
  for (Ring& ring : rings_) {
    const size_t token = ring.token_bytes();
    const auto tokens = in.value<uint32_t>("tokens of a sliding layer");
    const auto kept = in.value<uint32_t>("tokens of a sliding layer");
    // A truncation leaves fewer than slots, but never fewer than the window.
    if (tokens > max_tokens_ || kept > tokens || kept > ring.slots ||
        kept < std::min(tokens, ring.window)) {
      throw Error(Status::corrupt,
                  "a sliding layer keeps " + std::to_string(kept) + " of " +
                      std::to_string(tokens) + " tokens, allowed: those of its window of " +
                      std::to_string(ring.window) + " and up to " +
                      std::to_string(ring.slots - std::min(ring.slots, ring.window)) + " more");
    }
    const auto k = in.array<std::byte>(kept * token, "keys of a sliding layer");
    const auto v = in.array<std::byte>(kept * token, "values of a sliding layer");
    for (const auto* rows : {&k, &v}) {
      const auto dtype = static_cast<size_t>(engine_->model().kv_dtype);
      if (!engine_->kernels().all_finite[dtype](
              rows->data(), size_t{kept} * ring.shape.kv_heads * ring.shape.head_dim)) {
        throw Error(Status::corrupt, "a sliding layer has an element of K or V that is not finite");
      }
    }
    ring.tokens = ring.oldest = tokens - kept;
    append(ring, k.data(), v.data(), kept);
  }
}

}  // namespace keyhole::runtime
