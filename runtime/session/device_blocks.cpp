#include "runtime/session/device_blocks.h"

namespace keyhole::runtime {

gpu::BlockedShape DeviceBlocks::shape_of(uint32_t layer) const {
  const LayerShape m = engine_->model().of(layer);
  return {m.q_heads, m.kv_heads, m.head_dim, engine_->model().kv_dtype,
          params_->kv_host == KEYHOLE_KV_HOST_INT8};
}

DeviceBlocks::Parts& DeviceBlocks::parts_of(uint32_t layer) {
  const LayerShape shape = engine_->model().of(layer);
  for (Parts& parts : parts_) {
    if (parts.shape == shape) return parts;
  }
  return parts_.emplace_back(Parts{.shape = shape});
}

bool DeviceBlocks::has_blocked(uint32_t layer) const {
  return engine_->device_has(gpu::DevicePart::blocked) &&
         gpu::why_no_blocked(shape_of(layer)).empty();
}

bool DeviceBlocks::has_listed(uint64_t rows) const {
  return engine_->device_has(gpu::DevicePart::listed) && rows <= gpu::kMostListedRows;
}

gpu::BlockedAttention& DeviceBlocks::blocked(uint32_t layer) {
  Parts& parts = parts_of(layer);
  if (parts.blocked == nullptr) {
    parts.blocked = engine_->stream_device().make_blocked(sequence_->resident(), shape_of(layer));
  }
  return *parts.blocked;
}

gpu::ListedAttention& DeviceBlocks::listed(uint32_t layer) {
  Parts& parts = parts_of(layer);
  if (parts.listed == nullptr) {
    parts.listed = engine_->stream_device().make_listed(sequence_->resident(), shape_of(layer));
  }
  return *parts.listed;
}

void DeviceBlocks::release_listed(uint32_t layer) {
  Parts& parts = parts_of(layer);
  if (parts.listed != nullptr) parts.listed->release();
}

std::array<KvView, 2> DeviceBlocks::offloaded_rows(uint32_t layer) const {
  const KvView all = sequence_->view(layer);
  // What has codes is pinned; what comes behind it may be in part.
  const size_t count = codes_->pinned_rows(layer);
  KvView pinned = all.slice(0, count);
  pinned.keys.memory = pinned.values.memory = Memory::pinned;
  return {pinned, all.slice(count, all.keys.tokens - count)};
}

size_t DeviceBlocks::bytes() const {
  size_t bytes = 0;
  for (const Parts& parts : parts_) {
    bytes += parts.blocked == nullptr ? 0 : parts.blocked->bytes();
    bytes += parts.listed == nullptr ? 0 : parts.listed->bytes();
  }
  return bytes;
}

}  // namespace keyhole::runtime
