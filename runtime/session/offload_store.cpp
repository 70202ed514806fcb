#include "runtime/session/offload_store.h"

#include <algorithm>

#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t array_bytes(size_t capacity, size_t row_bytes) {
  const size_t bytes = checked_product({capacity, row_bytes}, "offloaded K and V");
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

}  // namespace

OffloadStore::OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype,
                           size_t capacity)
    : kv_heads_(kv_heads),
      head_dim_(head_dim),
      dtype_(dtype),
      capacity_(capacity),
      row_bytes_(head_dim * dtype_size(dtype)),
      array_bytes_(array_bytes(capacity, row_bytes_)),
      memory_(checked_product({2, layers, kv_heads, array_bytes_}, "offloaded K and V"), false),
      rows_(layers, 0),
      pinned_(layers, 0) {}

KvView OffloadStore::view(uint32_t layer, uint32_t kv_head) const {
  const auto rows = [&](uint32_t which) {
    return RowsView{memory_.data() + offset(layer, kv_head, which), row_bytes_, rows_[layer],
                    head_dim_, dtype_};
  };
  return {rows(0), rows(1)};
}

std::byte* OffloadStore::key(uint32_t layer, uint32_t kv_head, size_t row) {
  return memory_.data() + offset(layer, kv_head, 0) + row * row_bytes_;
}

std::byte* OffloadStore::value(uint32_t layer, uint32_t kv_head, size_t row) {
  return memory_.data() + offset(layer, kv_head, 1) + row * row_bytes_;
}

void OffloadStore::prepare(uint32_t layer, uint32_t n) {
  const size_t before = rows_[layer] * row_bytes_;
  const size_t after = (size_t{rows_[layer]} + n) * row_bytes_;
  // The first 2 MiB of an array stay on small pages: a short context would otherwise touch a huge
  // page of each of the hundreds of arrays (1 GiB for 32 layers of 8 heads).
  if (before > kHugePage || after <= kHugePage) return;
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    for (uint32_t which = 0; which < 2; ++which) {
      const size_t begin = offset(layer, h, which);
      memory_.advise_huge(begin + kHugePage, begin + array_bytes_);
    }
  }
}

void OffloadStore::truncate(uint32_t layer, uint32_t rows) {
  if (rows >= rows_[layer]) return;
  const size_t from = std::min<size_t>(std::max<size_t>(rows, pinned_[layer]), rows_[layer]);
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    for (uint32_t which = 0; which < 2; ++which) {
      const size_t begin = offset(layer, h, which);
      memory_.release(begin + from * row_bytes_, begin + rows_[layer] * row_bytes_);
    }
  }
  rows_[layer] = rows;
}

size_t OffloadStore::bytes() const {
  size_t rows = 0;
  for (const uint32_t r : rows_) rows += r;
  return rows * 2 * kv_heads_ * row_bytes_;
}

}  // namespace keyhole::runtime
