#include "runtime/kv/offload_store.h"

#include <algorithm>

#include "cpu/aligned.h"
#include "runtime/engine/sizes.h"

namespace keyhole::runtime {
namespace {

constexpr size_t kPage = 4096;

/// Of the K or V of one head: whole huge pages.
size_t array_bytes(uint32_t layers, uint32_t kv_heads, size_t capacity, size_t row_bytes) {
  const size_t bytes = checked_product({capacity, row_bytes}, "offloaded K and V");
  const size_t whole =
      (bytes + cpu::kHugePageBytes - 1) / cpu::kHugePageBytes * cpu::kHugePageBytes;
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

OffloadStore::Kind::Kind(uint32_t layers, uint32_t heads, uint32_t dim, DType dtype,
                         size_t capacity)
    : kv_heads(heads),
      head_dim(dim),
      arrays(layers, size_t{2} * heads,
             array_bytes(layers, heads, capacity, dim * dtype_size(dtype))),
      scales(layers, 1, dtype == DType::i8 ? scale_array_bytes(layers, heads, capacity, dim) : 0) {}

OffloadStore::OffloadStore(std::span<const LayerShape> shapes, DType dtype, size_t capacity,
                           cpu::Pool* pool)
    : pool_(pool), dtype_(dtype), capacity_(capacity), layers_(shapes.size()) {
  const auto same = [](const LayerShape& a, const LayerShape& b) {
    return a.kv_heads == b.kv_heads && a.head_dim == b.head_dim;
  };
  for (size_t first = 0; first < shapes.size(); ++first) {
    if (layers_[first].kind != nullptr) continue;
    std::vector<size_t> alike;
    for (size_t i = first; i < shapes.size(); ++i) {
      if (same(shapes[i], shapes[first])) alike.push_back(i);
    }
    kinds_.push_back(std::make_unique<Kind>(static_cast<uint32_t>(alike.size()),
                                            shapes[first].kv_heads, shapes[first].head_dim, dtype,
                                            capacity));
    for (size_t place = 0; place < alike.size(); ++place) {
      layers_[alike[place]] = {kinds_.back().get(), static_cast<uint32_t>(place)};
    }
  }
}

KvView OffloadStore::view(uint32_t layer) const {
  const Layer& l = layers_[layer];
  const auto rows = [&](uint32_t which) {
    const auto first_of = [&](uint32_t other) {
      return l.kind->arrays.at(l.place, array(0, other));
    };
    // Arrays are equally far apart: K of a head, V of the head, K of the next.
    const ptrdiff_t apart = 2 * (first_of(1) - first_of(0));
    RowsView view{{.data = first_of(which),
                   .token_stride = l.kind->head_dim,
                   .head_stride = apart / static_cast<ptrdiff_t>(dtype_size(dtype_)),
                   .tokens = l.rows,
                   .heads = l.kind->kv_heads,
                   .dim = l.kind->head_dim,
                   .dtype = dtype_}};
    if (dtype_ == DType::i8) {
      view.scales = {scales_at(layer, 0, which, 0), scale_stride(layer), 0,
                     ptrdiff_t{2} * l.kind->head_dim};
    }
    return view;
  };
  return {rows(0), rows(1)};
}

std::byte* OffloadStore::key(uint32_t layer, uint32_t kv_head, size_t row) {
  const Layer& l = layers_[layer];
  return l.kind->arrays.at(l.place, array(kv_head, 0)) + row * row_bytes(layer);
}

std::byte* OffloadStore::value(uint32_t layer, uint32_t kv_head, size_t row) {
  const Layer& l = layers_[layer];
  return l.kind->arrays.at(l.place, array(kv_head, 1)) + row * row_bytes(layer);
}

void OffloadStore::take(uint32_t layer, size_t from, size_t to, size_t kept) {
  const Layer& l = layers_[layer];
  l.kind->arrays.prepare(l.place, from * row_bytes(layer), to * row_bytes(layer), pool_,
                         kept * row_bytes(layer));
  l.kind->scales.prepare(l.place, scale_bytes(layer, from), scale_bytes(layer, to), nullptr,
                         scale_bytes(layer, kept));
}

void OffloadStore::release(uint32_t layer, size_t from) {
  const Layer& l = layers_[layer];
  l.kind->arrays.truncate(l.place, from * row_bytes(layer));
  l.kind->scales.truncate(l.place, scale_bytes(layer, from));
}

void OffloadStore::prepare(uint32_t layer, uint32_t n) {
  take(layer, rows(layer), size_t{rows(layer)} + n);
}

void OffloadStore::prepare_in_place(uint32_t layer, uint32_t row, uint32_t n) {
  take(layer, row, size_t{row} + n, rows(layer));
}

void OffloadStore::set_pinned(uint32_t layer, size_t pinned) {
  Layer& l = layers_[layer];
  // Memory is taken when it is pinned, not when rows come, and with it the page where the next rows begin: once pinned,
  // it cannot be exchanged.
  if (pinned > l.pinned) {
    const size_t next = std::min(capacity_, size_t{l.rows} + kScaleRows);
    take(layer, l.rows, std::max(pinned, next));
  } else if (pinned < l.pinned && l.rows < l.pinned) {
    release(layer, std::max<size_t>(l.rows, pinned));
  }
  l.pinned = pinned;
}

void OffloadStore::truncate(uint32_t layer, uint32_t rows) {
  Layer& l = layers_[layer];
  if (rows >= l.rows) return;
  release(layer, std::max<size_t>(rows, l.pinned));
  l.rows = rows;
}

void OffloadStore::share(uint32_t layer, const OffloadStore& from) {
  Layer& l = layers_[layer];
  const Kind& other = *from.layers_[layer].kind;
  const uint32_t rows = from.rows(layer);
  l.kind->arrays.share(l.place, other.arrays, rows * row_bytes(layer));
  l.kind->scales.share(l.place, other.scales, scale_bytes(layer, rows));
  l.rows = rows;
}

bool OffloadStore::is_shared(uint32_t layer, uint32_t row) const {
  const Layer& l = layers_[layer];
  return l.kind->arrays.is_shared(l.place, row * row_bytes(layer)) ||
         l.kind->scales.is_shared(l.place, scale_bytes(layer, row));
}

uint32_t OffloadStore::common_rows(uint32_t layer, const OffloadStore& other) const {
  const Layer &l = layers_[layer], &o = other.layers_[layer];
  size_t common = std::min(l.rows, o.rows);
  common =
      std::min(common, l.kind->arrays.common_bytes(l.place, o.kind->arrays) / row_bytes(layer));
  if (dtype_ == DType::i8) {
    const size_t blocks =
        l.kind->scales.common_bytes(l.place, o.kind->scales) / scale_bytes(layer, kScaleRows);
    common = std::min(common, blocks * kScaleRows);
  }
  return static_cast<uint32_t>(common);
}

size_t OffloadStore::bytes() const {
  size_t bytes = 0;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    bytes += size_t{rows(layer)} * 2 * layers_[layer].kind->kv_heads * row_bytes(layer) +
             scale_bytes(layer, rows(layer));
  }
  return bytes;
}

size_t OffloadStore::shared_page_bytes() const {
  size_t bytes = 0;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const Layer& l = layers_[layer];
    const auto counted = [&](const cpu::SharedArrays& arrays, size_t held) {
      return arrays.has_shared_pages() ? arrays.bytes(l.place, held).counted : 0;
    };
    bytes += counted(l.kind->arrays, l.rows * row_bytes(layer)) +
             counted(l.kind->scales, scale_bytes(layer, l.rows));
  }
  return bytes;
}

size_t OffloadStore::bytes_of_others() const {
  size_t bytes = 0;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const Layer& l = layers_[layer];
    bytes += l.kind->arrays.bytes(l.place, l.rows * row_bytes(layer)).counted_by_others +
             l.kind->scales.bytes(l.place, scale_bytes(layer, l.rows)).counted_by_others;
  }
  return bytes;
}

}  // namespace keyhole::runtime
