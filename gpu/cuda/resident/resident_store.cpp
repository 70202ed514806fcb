#include "gpu/cuda/resident/resident_store.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/waiting.h"
#include "gpu/cuda/rings/ring_tokens.h"

namespace keyhole::gpu {

ResidentStore::ResidentStore(const ResidentShape& shape, int ordinal, HostExchange& exchange)
    : shape_(shape),
      ordinal_(ordinal),
      ring_{shape.sink, shape.window_capacity, shape.window == 0 ? 0 : shape.window - 1},
      layout_(shape),
      row_bytes_(size_t{shape.kv_heads} * shape.head_dim * dtype_size(shape.dtype)),
      exchange_(&exchange),
      mirror_(ring_, shape.layers, row_bytes_),
      idle_after_(shape.layers) {
  const DeviceScope device(ordinal_);
  const BesideCapture beside;
  kv_ = DeviceBuffer(resident_bytes(shape_));
  scratch_ = DeviceBuffer(layout_.bytes());
  scratch_.clear();
  staging_ = PinnedBuffer(staging_bytes(shape_));
  own_ = std::make_unique<OwnStream>();
  for (auto& event : staged_) event = std::make_unique<Event>();
}

ResidentStore::~ResidentStore() { (void)cudaStreamSynchronize(own_->get()); }

void ResidentStore::read_back(size_t offset, void* to, size_t bytes) const {
  const std::lock_guard lock(copy_mutex_);
  const DeviceScope device(ordinal_);
  const BesideCapture beside;
  std::byte* pinned = exchange_->copied();
  check(
      cudaMemcpyAsync(pinned, scratch_.data() + offset, bytes, cudaMemcpyDeviceToHost, own_->get()),
      "copying a state back");
  own_->wait("copying a state back");
  std::memcpy(to, pinned, bytes);
}

void ResidentStore::wait_idle(uint32_t layer) {
  const uint32_t awaited = exchange_->awaited(layer);
  if (idle_after_[layer] == awaited) return;
  // The last block of a head to look at K and V counts the head's state up to the step.
  std::vector<RingState> states(shape_.kv_heads);
  const auto ready = [&] {
    read_back(layout_.states(layer), states.data(), states.size() * sizeof(RingState));
    return std::all_of(states.begin(), states.end(), [&](const RingState& state) {
      return has_reached(state.sequence, awaited);
    });
  };
  const uint32_t timeout_ms = exchange_->timeout_ms();
  const uint64_t patience_us = uint64_t{timeout_ms} * 1000;
  if (!wait_until(ready, patience_us, patience_us, [] { return false; })) {
    throw Error(Status::timeout, "layer " + std::to_string(shape_.number_of(layer)) +
                                     ": the device has not ended its part of step " +
                                     std::to_string(awaited) + " within " +
                                     std::to_string(timeout_ms) + " ms");
  }
  idle_after_[layer] = awaited;
}

void ResidentStore::finish_own_work() {
  if (!own_is_busy_) return;
  const BesideCapture beside;
  own_->wait("copying rows to the device");
  own_is_busy_ = false;
}

// --- rows of the host --------------------------------------------------------------------------------

void ResidentStore::append(uint32_t layer, uint32_t first, const std::byte* k, const std::byte* v,
                           uint32_t n) {
  const DeviceScope device(ordinal_);
  const BesideCapture beside;
  AppendParams p;
  p.ring = ring_;
  p.after = mirror_.state(layer);
  p.states = states(layer);
  p.kv = rows_of(layer);
  p.kv_heads = shape_.kv_heads;
  p.row_bytes = static_cast<uint32_t>(row_bytes_ / shape_.kv_heads);

  const size_t half_bytes = staging_.bytes() / 2;
  const auto at_once = static_cast<uint32_t>(
      std::min<size_t>(n, std::max<size_t>(1, half_bytes / (2 * row_bytes_))));
  for (uint32_t done = 0; done < n; done += p.n) {
    p.n = std::min(at_once, n - done);
    p.first = first + done;
    staged_[half_]->wait("copying rows to the device");
    std::byte* to = staging_.data() + half_ * half_bytes;
    std::memcpy(to, k + done * row_bytes_, p.n * row_bytes_);
    std::memcpy(to + p.n * row_bytes_, v + done * row_bytes_, p.n * row_bytes_);
    p.from = staging_.device(half_ * half_bytes);
    launch_append(p, own_->get());
    staged_[half_]->record(own_->get());
    half_ ^= 1U;
  }
  if (n == 0) launch_append(p, own_->get());
  own_is_busy_ = true;
  if (streams_used_) finish_own_work();
}

void ResidentStore::append_sink(uint32_t layer, const std::byte* k, const std::byte* v,
                                uint32_t n) {
  if (n == 0) return;
  wait_idle(layer);
  const uint32_t first = mirror_.state(layer).sink;
  mirror_.append_sink(layer, k, v, n);
  append(layer, first, k, v, n);
}

void ResidentStore::append_window(uint32_t layer, const std::byte* k, const std::byte* v,
                                  uint32_t n) {
  if (n == 0) return;
  wait_idle(layer);
  const uint32_t first = mirror_.state(layer).tokens();
  mirror_.append_window(layer, k, v, n);
  append(layer, first, k, v, n);
}

void ResidentStore::evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n) {
  if (n == 0) return;
  wait_idle(layer);
  mirror_.evict(layer, k, v, n);
  append(layer, 0, nullptr, nullptr, 0);
}

void ResidentStore::truncate(uint32_t layer, uint32_t sink, uint32_t window) {
  wait_idle(layer);
  mirror_.truncate(layer, sink, window);
  append(layer, 0, nullptr, nullptr, 0);
}

void ResidentStore::read(uint32_t layer, std::byte* k, std::byte* v) const {
  mirror_.read(layer, 0, mirror_.state(layer).tokens(), k, v);
}

// --- rows as others see them -------------------------------------------------------------------------

void ResidentStore::keep_newest(std::span<const uint32_t> layers, uint32_t of,
                                std::span<const uint32_t> kept, cudaStream_t stream) {
  if (of > kMostDrafts || kept.size() > of) {
    throw Error(Status::invalid_argument, std::to_string(kept.size()) + " tokens of " +
                                              std::to_string(of) + " are to be kept; allowed are " +
                                              std::to_string(kMostDrafts));
  }
  const DeviceScope device(ordinal_);
  finish_own_work();
  KeepParams p;
  p.ring = ring_;
  p.kv_heads = shape_.kv_heads;
  p.row_bytes = static_cast<uint32_t>(row_bytes_ / shape_.kv_heads);
  p.of = of;
  p.kept = static_cast<uint32_t>(kept.size());
  for (uint32_t i = 0; i < p.kept; ++i) p.numbers[i] = static_cast<uint8_t>(kept[i]);
  p.layers = shape_.layers;
  p.states = states(0);
  p.states_bytes = layout_.states(1) - layout_.states(0);
  p.kv = kv_.data();
  p.layer_bytes = layer_bytes();
  for (const uint32_t layer : layers) p.takes_part[layer / 64] |= uint64_t{1} << layer % 64;
  launch_keep_newest(p, stream);
}

KvPieces ResidentStore::host_copy(uint32_t layer) {
  return mirror_.rows(layer, shape_.kv_heads, shape_.head_dim, shape_.dtype);
}

KvPieces ResidentStore::device_rows(uint32_t layer) {
  finish_own_work();
  const size_t row = row_bytes_ / shape_.kv_heads;
  const size_t plane = (size_t{shape_.sink} + shape_.window_capacity) * row;
  const std::byte* const base = rows_of(layer);
  KvPieces all;
  mirror_.for_pieces(layer, [&](uint32_t slot, uint32_t n) {
    TensorView rows = dense_tensor(base + slot * row, n, shape_.kv_heads, shape_.head_dim,
                                   shape_.dtype, Memory::device);
    rows.token_stride = shape_.head_dim;
    rows.head_stride = static_cast<ptrdiff_t>(2 * plane / dtype_size(shape_.dtype));
    KvView& piece = all.pieces[all.count++];
    piece.keys = piece.values = {rows};
    piece.values.data += plane;
  });
  return all;
}

void ResidentStore::set_ring(uint32_t layer, StepParams& p) const {
  p.ring = ring_;
  p.logits = shape_.logits_of(layer);
  p.kv_heads = shape_.kv_heads;
  p.group = shape_.q_heads / shape_.kv_heads;
  p.kv = rows_of(layer);
  p.dtype = shape_.dtype;
  p.states = states(layer);
}

}  // namespace keyhole::gpu
