#include "index/partitions/key_lists.h"

#include <algorithm>

#include "cpu/row_access.h"

namespace keyhole::index {

KeyLists::KeyLists(const cpu::Kernels& kernels, DType dtype, const RowsView& keys, size_t first,
                   std::span<const uint32_t> labels, size_t lists)
    : rows_(labels.size()),
      offsets_(lists),
      sizes_(lists),
      row_bytes_(keys.dim * dtype_size(dtype)) {
  if (!labels.empty()) keys_ = cpu::ReservedBuffer(labels.size() * row_bytes_);
  for (const uint32_t label : labels) ++sizes_[label];
  uint32_t offset = 0;
  for (size_t l = 0; l < lists; ++l) {
    offsets_[l] = offset;
    offset += sizes_[l];
    sizes_[l] = 0;
  }
  for (size_t i = 0; i < labels.size(); ++i) {
    const size_t slot = offsets_[labels[i]] + sizes_[labels[i]]++;
    rows_[slot] = static_cast<uint32_t>(first + i);
    cpu::copy_row(kernels, keys, first + i, dtype, keys_.data() + slot * row_bytes_);
  }
}

KeyLists KeyLists::encoded(const KeyCodes& codes, uint32_t dim, DType dtype) const {
  KeyLists out;
  out.rows_ = rows_;
  out.offsets_ = offsets_;
  out.sizes_ = sizes_;
  out.row_bytes_ = codes.stride();
  if (rows_.empty()) return out;
  out.keys_ = cpu::ReservedBuffer(rows_.size() * codes.stride());
  codes.encode_rows({keys_.data(), row_bytes_, rows_.size(), dim, dtype}, 0, rows_.size(),
                    reinterpret_cast<int8_t*>(out.keys_.data()));
  return out;
}

void KeyLists::truncate(size_t row) {
  for (size_t l = 0; l < sizes_.size(); ++l) {
    const uint32_t* begin = rows_.data() + offsets_[l];
    sizes_[l] = static_cast<uint32_t>(std::lower_bound(begin, begin + sizes_[l], row) - begin);
  }
}

size_t KeyLists::bytes() const { return estimate(rows_.size(), sizes_.size(), row_bytes_); }

size_t KeyLists::estimate(size_t rows, size_t lists, size_t row_bytes) {
  return rows * (row_bytes + sizeof(uint32_t)) + lists * 2 * sizeof(uint32_t);
}

}  // namespace keyhole::index
