#include "runtime/session/offload_store.h"

#include <algorithm>

#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

/// Of the K or V of one head: whole huge pages.
size_t array_bytes(uint32_t layers, uint32_t kv_heads, size_t capacity, size_t row_bytes) {
  const size_t bytes = checked_product({capacity, row_bytes}, "offloaded K and V");
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  (void)checked_product({2, layers, kv_heads, whole}, "offloaded K and V");
  return whole;
}

/// Of a layer's scales: whole pages, so that layers can be pinned one by one.
size_t scale_array_bytes(uint32_t layers, uint32_t kv_heads, size_t capacity, uint32_t head_dim) {
  const size_t blocks = (capacity + kScaleRows - 1) / kScaleRows;
  const size_t bytes =
      checked_product({blocks, 2, kv_heads, head_dim, sizeof(uint16_t)}, "scales of K and V");
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  (void)checked_product({layers, whole}, "scales of K and V");
  return whole;
}

}  // namespace

OffloadStore::OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype,
                           size_t capacity, cpu::Pool* pool)
    : pool_(pool),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      dtype_(dtype),
      capacity_(capacity),
      row_bytes_(head_dim * dtype_size(dtype)),
      arrays_(layers, size_t{2} * kv_heads, array_bytes(layers, kv_heads, capacity, row_bytes_)),
      scales_(layers, 1,
              dtype == DType::i8 ? scale_array_bytes(layers, kv_heads, capacity, head_dim) : 0),
      rows_(layers, 0),
      pinned_(layers, 0) {}

KvView OffloadStore::view(uint32_t layer, uint32_t kv_head) const {
  const auto rows = [&](uint32_t which) {
    RowsView view{arrays_.at(layer, array(kv_head, which)), row_bytes_, rows_[layer], head_dim_,
                  dtype_};
    if (dtype_ == DType::i8) {
      view.scales = {scales_at(layer, kv_head, which, 0), scale_stride(), 0};
    }
    return view;
  };
  return {rows(0), rows(1)};
}

std::byte* OffloadStore::key(uint32_t layer, uint32_t kv_head, size_t row) {
  return arrays_.at(layer, array(kv_head, 0)) + row * row_bytes_;
}

std::byte* OffloadStore::value(uint32_t layer, uint32_t kv_head, size_t row) {
  return arrays_.at(layer, array(kv_head, 1)) + row * row_bytes_;
}

void OffloadStore::take(uint32_t layer, size_t from, size_t to) {
  arrays_.prepare(layer, from * row_bytes_, to * row_bytes_, pool_);
  scales_.prepare(layer, scale_bytes(from), scale_bytes(to));
}

void OffloadStore::release(uint32_t layer, size_t from) {
  arrays_.truncate(layer, from * row_bytes_);
  scales_.truncate(layer, scale_bytes(from));
}

void OffloadStore::prepare(uint32_t layer, uint32_t n) {
  take(layer, rows_[layer], size_t{rows_[layer]} + n);
}

void OffloadStore::set_pinned(uint32_t layer, size_t pinned) {
  // Memory is taken when it is pinned, not when rows come, and with it the page where the next rows begin: once pinned, it
  // cannot be exchanged.
  if (pinned > pinned_[layer]) {
    const size_t next = std::min(capacity_, size_t{rows_[layer]} + kScaleRows);
    take(layer, rows_[layer], std::max(pinned, next));
  } else if (pinned < pinned_[layer] && rows_[layer] < pinned_[layer]) {
    release(layer, std::max<size_t>(rows_[layer], pinned));
  }
  pinned_[layer] = pinned;
}

void OffloadStore::truncate(uint32_t layer, uint32_t rows) {
  if (rows >= rows_[layer]) return;
  release(layer, std::max<size_t>(rows, pinned_[layer]));
  rows_[layer] = rows;
}

void OffloadStore::share(uint32_t layer, const OffloadStore& from) {
  const uint32_t rows = from.rows_[layer];
  arrays_.share(layer, from.arrays_, rows * row_bytes_);
  scales_.share(layer, from.scales_, scale_bytes(rows));
  rows_[layer] = rows;
}

bool OffloadStore::is_shared(uint32_t layer, uint32_t row) const {
  return arrays_.is_shared(layer, row * row_bytes_) || scales_.is_shared(layer, scale_bytes(row));
}

size_t OffloadStore::bytes() const {
  size_t bytes = 0;
  for (const uint32_t rows : rows_) {
    bytes += size_t{rows} * 2 * kv_heads_ * row_bytes_ + scale_bytes(rows);
  }
  return bytes;
}

size_t OffloadStore::bytes_of_others() const {
  size_t bytes = 0;
  for (uint32_t layer = 0; layer < rows_.size(); ++layer) {
    bytes += arrays_.bytes(layer, rows_[layer] * row_bytes_).counted_by_others +
             scales_.bytes(layer, scale_bytes(rows_[layer])).counted_by_others;
  }
  return bytes;
}

}  // namespace keyhole::runtime
