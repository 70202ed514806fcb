#include "index/partitions/key_lists.h"

#include <algorithm>

#include "cpu/row_access.h"

namespace keyhole::index {

KeyLists::KeyLists(const cpu::Kernels& kernels, DType dtype, const RowsView& keys, size_t first,
                   std::span<const uint32_t> labels, size_t lists)
    : offsets_(lists), sizes_(lists), row_bytes_(keys.dim * dtype_size(dtype)) {
  if (labels.empty()) return;
  Arrays arrays{cpu::ReservedBuffer(labels.size() * row_bytes_),
                std::vector<uint32_t>(labels.size())};
  for (const uint32_t label : labels) ++sizes_[label];
  uint32_t offset = 0;
  for (size_t l = 0; l < lists; ++l) {
    offsets_[l] = offset;
    offset += sizes_[l];
    sizes_[l] = 0;
  }
  for (size_t i = 0; i < labels.size(); ++i) {
    const size_t slot = offsets_[labels[i]] + sizes_[labels[i]]++;
    arrays.rows[slot] = static_cast<uint32_t>(first + i);
    cpu::copy_row(kernels, keys, first + i, dtype, arrays.keys.data() + slot * row_bytes_);
  }
  arrays_ = cpu::Shared<Arrays>(std::move(arrays));
}

KeyLists KeyLists::encoded(const KeyCodes& codes, uint32_t dim, DType dtype) const {
  KeyLists out;
  out.offsets_ = offsets_;
  out.sizes_ = sizes_;
  out.row_bytes_ = codes.stride();
  if (!arrays_) return out;
  const std::vector<uint32_t>& rows = arrays_->rows;
  Arrays arrays{cpu::ReservedBuffer(rows.size() * codes.stride()), rows};
  codes.encode_rows(dense_rows(arrays_->keys.data(), rows.size(), dim, dtype), 0, rows.size(),
                    reinterpret_cast<int8_t*>(arrays.keys.data()));
  out.arrays_ = cpu::Shared<Arrays>(std::move(arrays));
  return out;
}

void KeyLists::truncate(size_t row) {
  for (size_t l = 0; arrays_ && l < sizes_.size(); ++l) {
    const uint32_t* begin = arrays_->rows.data() + offsets_[l];
    sizes_[l] = static_cast<uint32_t>(std::lower_bound(begin, begin + sizes_[l], row) - begin);
  }
}

size_t KeyLists::bytes() const {
  return estimate(arrays_ ? arrays_->rows.size() : 0, sizes_.size(), row_bytes_);
}

size_t KeyLists::estimate(size_t rows, size_t lists, size_t row_bytes) {
  return rows * (row_bytes + sizeof(uint32_t)) + lists * 2 * sizeof(uint32_t);
}

}  // namespace keyhole::index
