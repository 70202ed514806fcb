#include "runtime/session/offload_store.h"

#include <algorithm>

#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

size_t array_bytes(size_t capacity, size_t row_bytes) {
  const size_t bytes = checked_product({capacity, row_bytes}, "offloaded K and V");
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

/// Of a layer's scales: whole pages, so that layers can be pinned one by one.
size_t scale_bytes(size_t capacity, uint32_t kv_heads, uint32_t head_dim) {
  const size_t blocks = (capacity + kScaleRows - 1) / kScaleRows;
  const size_t bytes =
      checked_product({blocks, 2, kv_heads, head_dim, sizeof(uint16_t)}, "scales of K and V");
  return (bytes + kPage - 1) / kPage * kPage;
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
      layer_scale_bytes_(dtype == DType::i8 ? scale_bytes(capacity, kv_heads, head_dim) : 0),
      memory_(checked_product({2, layers, kv_heads, array_bytes_}, "offloaded K and V"), false),
      scales_(checked_product({layers, layer_scale_bytes_}, "scales of K and V"), false),
      rows_(layers, 0),
      pinned_(layers, 0) {}

KvView OffloadStore::view(uint32_t layer, uint32_t kv_head) const {
  const auto rows = [&](uint32_t which) {
    RowsView view{memory_.data() + offset(layer, kv_head, which), row_bytes_, rows_[layer],
                  head_dim_, dtype_};
    if (dtype_ == DType::i8) {
      view.scales = {scales_at(layer, kv_head, which, 0), scale_stride(), 0};
    }
    return view;
  };
  return {rows(0), rows(1)};
}

std::byte* OffloadStore::key(uint32_t layer, uint32_t kv_head, size_t row) {
  return memory_.data() + offset(layer, kv_head, 0) + row * row_bytes_;
}

std::byte* OffloadStore::value(uint32_t layer, uint32_t kv_head, size_t row) {
  return memory_.data() + offset(layer, kv_head, 1) + row * row_bytes_;
}

void OffloadStore::advise_pages(uint32_t layer, size_t before, size_t after) {
  // The first 2 MiB of an array stay on small pages: a short context would otherwise touch a huge
  // page of each of the hundreds of arrays (1 GiB for 32 layers of 8 heads).
  if (before * row_bytes_ > kHugePage || after * row_bytes_ <= kHugePage) return;
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    for (uint32_t which = 0; which < 2; ++which) {
      const size_t begin = offset(layer, h, which);
      memory_.advise_huge(begin + kHugePage, begin + array_bytes_);
    }
  }
}

void OffloadStore::release(uint32_t layer, size_t from, size_t to) {
  if (from >= to) return;
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    for (uint32_t which = 0; which < 2; ++which) {
      const size_t begin = offset(layer, h, which);
      memory_.release(begin + from * row_bytes_, begin + to * row_bytes_);
    }
  }
  if (dtype_ == DType::i8) {
    const size_t begin = layer * layer_scale_bytes_;
    scales_.release(begin + scale_count(from) * sizeof(uint16_t),
                    begin + scale_count(to) * sizeof(uint16_t));
  }
}

void OffloadStore::prepare(uint32_t layer, uint32_t n) {
  // What is pinned is there, on the pages that it has.
  advise_pages(layer, std::max<size_t>(rows_[layer], pinned_[layer]), size_t{rows_[layer]} + n);
}

void OffloadStore::set_pinned(uint32_t layer, size_t pinned) {
  const size_t before = std::max<size_t>(rows_[layer], pinned_[layer]);
  const size_t after = std::max<size_t>(rows_[layer], pinned);
  // Memory is taken when it is pinned, not when rows come.
  advise_pages(layer, before, after);
  release(layer, after, before);
  pinned_[layer] = pinned;
}

void OffloadStore::truncate(uint32_t layer, uint32_t rows) {
  if (rows >= rows_[layer]) return;
  release(layer, std::max<size_t>(rows, pinned_[layer]), rows_[layer]);
  rows_[layer] = rows;
}

size_t OffloadStore::bytes() const {
  size_t bytes = 0;
  for (const uint32_t rows : rows_) {
    bytes += size_t{rows} * 2 * kv_heads_ * row_bytes_ + scale_count(rows) * sizeof(uint16_t);
  }
  return bytes;
}

}  // namespace keyhole::runtime
