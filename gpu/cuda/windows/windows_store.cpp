#include "gpu/cuda/windows/windows_store.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/rings/ring_tokens.h"
#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

/// A full ring loses its oldest token to the new one.
RingShape ring_of(uint32_t slots) { return {0, slots, slots - 1}; }

void check_shape(const WindowsShape& shape, DType dtype) {
  if (shape.dtype != dtype) {
    refuse_windows(std::string("K and V in ") + dtype_name(shape.dtype) +
                   "; the session's other layers have " + dtype_name(dtype));
  }
  if (!shape.shapes.empty()) refuse_windows("layers of different shapes; allowed is one");
  if (shape.kv_heads == 0 || shape.q_heads % shape.kv_heads != 0) {
    refuse_windows(std::to_string(shape.q_heads) + " query heads for " +
                   std::to_string(shape.kv_heads) + " KV heads");
  }
  const std::string why = unsupported_shape(shape.q_heads, shape.kv_heads, shape.head_dim);
  if (!why.empty()) throw Error(Status::unsupported, "sliding layers on a CUDA device: " + why);
  if (shape.layers.empty() || shape.layers.size() > KeepParams::kMostLayers) {
    refuse_windows(std::to_string(shape.layers.size()) + " layers; allowed are 1.." +
                   std::to_string(KeepParams::kMostLayers));
  }
  constexpr uint32_t kMostSlots = uint32_t{1} << 30U;
  for (const WindowsShape::Layer& layer : shape.layers) {
    if (layer.window != 0 && layer.slots != 0 && layer.slots <= kMostSlots) continue;
    refuse_windows("layer " + std::to_string(layer.number) + " with a window of " +
                   std::to_string(layer.window) + " tokens in " + std::to_string(layer.slots) +
                   " slots; allowed are 1..2^30 slots");
  }
}

}  // namespace

void refuse_windows(const std::string& text) {
  throw Error(Status::invalid_argument, "sliding layers on a CUDA device: " + text);
}

void check_window_rows(const TensorView& rows, const char* what) {
  if (rows.data == nullptr) refuse_windows(std::string(what) + " of a step: a null pointer");
  if (rows.dtype != DType::f32 && rows.dtype != DType::f16 && rows.dtype != DType::bf16) {
    refuse_windows(std::string(what) + " of a step: dtype " + dtype_name(rows.dtype) +
                   "; allowed are f32, f16, bf16");
  }
}

WindowsStore::WindowsStore(const ResidentPlace& place, const WindowsShape& shape)
    : session_(place, "sliding layers on a CUDA device"), shape_(shape), layout_(shape) {
  check_shape(shape_, place.shape.dtype);
  const DeviceScope device(session_.ordinal());
  const BesideCapture beside;
  session_.claim(layout_.bytes, "sliding windows");
  try {
    memory_ = DeviceBuffer(layout_.bytes);
    own_ = std::make_unique<OwnStream>();
    clear();
  } catch (...) {
    session_.release(layout_.bytes);
    throw;
  }
}

WindowsStore::~WindowsStore() { session_.release(layout_.bytes); }

void WindowsStore::check_layer(uint32_t layer) const {
  if (layer < shape_.layers.size()) return;
  refuse_windows("a step of layer " + std::to_string(layer) + "; there are " +
                 std::to_string(shape_.layers.size()));
}

RingShape WindowsStore::ring(uint32_t layer) const { return ring_of(shape_.layers[layer].slots); }

// --- tokens ------------------------------------------------------------------------------------------

void WindowsStore::clear() {
  const size_t d = shape_.head_dim, group = shape_.q_heads / shape_.kv_heads;
  std::vector<std::byte> ends(layout_.bytes - layout_.end_states);
  for (uint32_t layer = 0; layer < shape_.layers.size(); ++layer) {
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      std::vector<float> lse(group, -std::numeric_limits<float>::infinity());
      if (!shape_.sinks.empty()) {
        const float* const sinks = shape_.sinks.data() + size_t{layer} * shape_.q_heads;
        std::copy_n(sinks + h * group, group, lse.begin());
      }
      std::byte* const to = ends.data() + layout_.end_state(layer, h) - layout_.end_states;
      std::memcpy(to + group * d * sizeof(float), lse.data(), group * sizeof(float));
    }
  }
  check(cudaMemsetAsync(memory_.data(), 0, layout_.end_states, own_->get()), "sliding windows");
  check(cudaMemcpyAsync(memory_.data() + layout_.end_states, ends.data(), ends.size(),
                        cudaMemcpyHostToDevice, own_->get()),
        "sliding windows");
  own_->wait("sliding windows");
}

template <class Body>
void WindowsStore::for_runs(uint32_t layer, uint32_t first, uint32_t n, const Body& body) const {
  const size_t row = row_bytes(), slots = shape_.layers[layer].slots;
  const size_t at = first % slots, straight = std::min<size_t>(n, slots - at);
  std::byte* const kv = memory_.data() + layout_.kv(layer);
  for (size_t plane = 0; plane < 2 * size_t{shape_.kv_heads}; ++plane) {
    std::byte* const there = kv + plane * slots * row;
    if (straight != 0) body(there + at * row, plane * n * row, straight * row);
    if (straight != n) body(there, (plane * n + straight) * row, (n - straight) * row);
  }
}

void WindowsStore::fill(uint32_t layer, uint32_t first, uint32_t n, const std::byte* k,
                        const std::byte* v) {
  const DeviceScope device(session_.ordinal());
  const BesideCapture beside;
  const size_t row = row_bytes();
  std::vector<std::byte> planes(2 * n * shape_.kv_heads * row);
  for (uint32_t plane = 0; plane < 2 * shape_.kv_heads; ++plane) {
    const std::byte* const from = (plane % 2 == 0 ? k : v) + plane / 2 * row;
    std::byte* const to = planes.data() + plane * n * row;
    for (uint32_t i = 0; i < n; ++i) {
      std::memcpy(to + i * row, from + i * shape_.kv_heads * row, row);
    }
  }
  for_runs(layer, first, n, [&](std::byte* there, size_t at, size_t bytes) {
    check(cudaMemcpyAsync(there, planes.data() + at, bytes, cudaMemcpyHostToDevice, own_->get()),
          "filling a sliding window");
  });
  keep(layer, first, n);
}

void WindowsStore::keep(uint32_t layer, uint32_t first, uint32_t n) {
  const DeviceScope device(session_.ordinal());
  const BesideCapture beside;
  AppendParams p;
  p.ring = ring(layer);
  p.after.begin = n == 0 ? 0 : first % p.ring.capacity;
  p.after.window = n;
  p.states = states(layer);
  p.kv = memory_.data() + layout_.kv(layer);
  p.kv_heads = shape_.kv_heads;
  p.row_bytes = static_cast<uint32_t>(row_bytes());
  launch_append(p, own_->get());
  own_->wait("a sliding window");
}

void WindowsStore::read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k,
                        std::byte* v) const {
  const DeviceScope device(session_.ordinal());
  const BesideCapture beside;
  const size_t row = row_bytes();
  std::vector<std::byte> planes(2 * n * shape_.kv_heads * row);
  for_runs(layer, first, n, [&](const std::byte* there, size_t at, size_t bytes) {
    check(cudaMemcpyAsync(planes.data() + at, there, bytes, cudaMemcpyDeviceToHost, own_->get()),
          "reading a sliding window");
  });
  own_->wait("reading a sliding window");
  for (uint32_t plane = 0; plane < 2 * shape_.kv_heads; ++plane) {
    std::byte* const to = (plane % 2 == 0 ? k : v) + plane / 2 * row;
    const std::byte* const from = planes.data() + plane * n * row;
    for (uint32_t i = 0; i < n; ++i) {
      std::memcpy(to + i * shape_.kv_heads * row, from + i * row, row);
    }
  }
}

void WindowsStore::append(uint32_t layer, uint32_t first, uint32_t kept, const TensorView& k,
                          const TensorView& v, cudaStream_t stream) {
  check_layer(layer);
  check_window_rows(k, "k");
  check_window_rows(v, "v");
  const auto n = static_cast<uint32_t>(k.tokens);
  if (n > kept || kept > shape_.layers[layer].slots) {
    refuse_windows(std::to_string(n) + " new tokens of " + std::to_string(kept) + ", in " +
                   std::to_string(shape_.layers[layer].slots) + " slots");
  }
  const DeviceScope device(session_.ordinal());
  AppendTokensParams p;
  p.ring = ring(layer);
  p.after.begin = (first + n - kept) % p.ring.capacity;
  p.after.window = kept;
  p.states = states(layer);
  p.kv = memory_.data() + layout_.kv(layer);
  p.dtype = shape_.dtype;
  p.k = k;
  p.v = v;
  p.first = kept - n;
  p.n = n;
  p.kv_heads = shape_.kv_heads;
  p.head_dim = shape_.head_dim;
  launch_append_tokens(p, stream);
  check(cudaStreamSynchronize(stream), "tokens of a prompt");
}

bool WindowsStore::are_finite(const TensorView& rows, DType as, cudaStream_t stream) {
  check_window_rows(rows, "rows");
  if (rows.tokens == 0) return true;
  const DeviceScope device(session_.ordinal());
  auto* const bad = memory_.as<uint32_t>(layout_.scratch.ready());
  uint32_t found = 0;
  check(cudaMemsetAsync(bad, 0, sizeof found, stream), "looking for a NaN");
  launch_find_bad(rows, as, bad, stream);
  check(cudaMemcpyAsync(&found, bad, sizeof found, cudaMemcpyDeviceToHost, stream),
        "looking for a NaN");
  check(cudaStreamSynchronize(stream), "looking for a NaN");
  return found == 0;
}

void WindowsStore::keep_newest(std::span<const uint32_t> layers, uint32_t of,
                               std::span<const uint32_t> kept, cudaStream_t stream) {
  if (of > kMostDrafts || kept.size() > of) {
    refuse_windows(std::to_string(kept.size()) + " tokens of " + std::to_string(of) +
                   " are to be kept; allowed are " + std::to_string(kMostDrafts));
  }
  const DeviceScope device(session_.ordinal());
  for (uint32_t g = 0; g < layout_.groups.size(); ++g) {
    const WindowsLayout::Group& group = layout_.groups[g];
    KeepParams p;
    p.ring = ring_of(group.slots);
    p.kv_heads = shape_.kv_heads;
    p.row_bytes = static_cast<uint32_t>(row_bytes());
    p.of = of;
    p.kept = static_cast<uint32_t>(kept.size());
    for (uint32_t i = 0; i < p.kept; ++i) p.numbers[i] = static_cast<uint8_t>(kept[i]);
    p.layers = group.count;
    p.states = memory_.as<RingState>(layout_.scratch.states(group.first));
    p.states_bytes = layout_.scratch.states(1) - layout_.scratch.states(0);
    p.kv = memory_.data() + group.kv;
    p.layer_bytes = group.layer_bytes;
    bool some = false;
    for (const uint32_t layer : layers) {
      if (layout_.group_of[layer] != g) continue;
      const uint32_t at = layout_.places[layer] - group.first;
      p.takes_part[at / 64] |= uint64_t{1} << at % 64;
      some = true;
    }
    if (some) launch_keep_newest(p, stream);
  }
}

// --- what steps are told -----------------------------------------------------------------------------

void WindowsStore::set_ring(uint32_t layer, StepParams& p) const {
  const ScratchLayout& scratch = layout_.scratch;
  p.ring = ring(layer);
  p.logits = shape_.layers[layer].logits;
  p.window = shape_.layers[layer].window;
  p.kv_heads = shape_.kv_heads;
  p.group = shape_.q_heads / shape_.kv_heads;
  p.kv = memory_.data() + layout_.kv(layer);
  p.dtype = shape_.dtype;
  p.states = states(layer);
  p.numbers = memory_.as<uint32_t>(scratch.numbers(layout_.places[layer]));
  p.arrivals = memory_.as<uint32_t>(scratch.arrivals(StepQueue::stream));
  p.partial_o = memory_.as<float>(scratch.partial_o(StepQueue::stream));
  p.partial_states = memory_.as<AttentionState>(scratch.partial_states(StepQueue::stream));
  p.resident_o = memory_.as<float>(scratch.resident_o(0));
  p.resident_lse = memory_.as<float>(scratch.resident_lse(0));
}

void WindowsStore::set_end(uint32_t layer, MergeParams& m) const {
  m.resident_o = memory_.as<float>(layout_.scratch.resident_o(0));
  m.resident_lse = memory_.as<float>(layout_.scratch.resident_lse(0));
  m.slots = memory_.data() + layout_.end_state(layer, 0);
  m.slot_bytes = layout_.end_state_bytes;
  m.waited = memory_.as<WaitSums>(layout_.scratch.waited());
  m.layer = shape_.layers[layer].number;
  m.group = shape_.q_heads / shape_.kv_heads;
  m.head_dim = shape_.head_dim;
  m.wait = false;
}

}  // namespace keyhole::gpu
