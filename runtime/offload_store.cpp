#include "runtime/offload_store.h"

#include "runtime/sizes.h"

namespace keyhole::runtime {

OffloadStore::OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype,
                           size_t capacity)
    : kv_heads_(kv_heads),
      head_dim_(head_dim),
      dtype_(dtype),
      capacity_(capacity),
      row_bytes_(head_dim * dtype_size(dtype)),
      rows_(layers, 0) {
  (void)checked_product({2, layers, kv_heads, capacity, row_bytes_}, "offloaded K and V");
  const size_t bytes = capacity * row_bytes_;
  const size_t heads = size_t{layers} * kv_heads;
  keys_.reserve(heads);
  values_.reserve(heads);
  for (size_t i = 0; i < heads; ++i) {
    keys_.emplace_back(bytes);
    values_.emplace_back(bytes);
  }
}

KvView OffloadStore::view(uint32_t layer, uint32_t kv_head) const {
  const size_t i = index(layer, kv_head);
  const auto rows = [&](const cpu::ReservedBuffer& b) {
    return RowsView{b.data(), row_bytes_, rows_[layer], head_dim_, dtype_};
  };
  return {rows(keys_[i]), rows(values_[i])};
}

std::byte* OffloadStore::key(uint32_t layer, uint32_t kv_head, size_t row) {
  return keys_[index(layer, kv_head)].data() + row * row_bytes_;
}

std::byte* OffloadStore::value(uint32_t layer, uint32_t kv_head, size_t row) {
  return values_[index(layer, kv_head)].data() + row * row_bytes_;
}

void OffloadStore::truncate(uint32_t layer, uint32_t rows) {
  if (rows >= rows_[layer]) return;
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    keys_[index(layer, h)].release_from(rows * row_bytes_);
    values_[index(layer, h)].release_from(rows * row_bytes_);
  }
  rows_[layer] = rows;
}

size_t OffloadStore::bytes() const {
  size_t rows = 0;
  for (const uint32_t r : rows_) rows += r;
  return rows * 2 * kv_heads_ * row_bytes_;
}

}  // namespace keyhole::runtime
