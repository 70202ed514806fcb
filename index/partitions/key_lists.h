// Keys regrouped by partition: the rows of a list lie next to each other, so that probing it is one stream.
#pragma once

#include <span>
#include <vector>

#include "cpu/memory.h"
#include "cpu/shared.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"
#include "index/scan/key_codes.h"

namespace keyhole::index {

/// One list: `size` contiguous keys, or their codes, and the rows that they are copies of, rising.
struct KeyList {
  const std::byte* keys = nullptr;
  const uint32_t* rows = nullptr;
  uint32_t size = 0;
};

/// Copies of the rows [first, first + labels.size()) of a view, list by list (Off and Idx of an inverted file). Lists
/// only ever get shorter. Copies of the object share the keys and the rows, which stay in place for all of them.
class KeyLists {
 public:
  KeyLists() = default;
  /// Makes this many empty lists.
  explicit KeyLists(size_t lists) : offsets_(lists), sizes_(lists) {}
  /// Copies rows first + i of `keys` into list labels[i] < lists, as `dtype`: the dtype of the keys, or what int8
  /// keys stand for.
  KeyLists(const cpu::Kernels& kernels, DType dtype, const RowsView& keys, size_t first,
           std::span<const uint32_t> labels, size_t lists);

  /// The same rows in lists of int8 codes in place of the keys.
  [[nodiscard]] KeyLists encoded(const KeyCodes& codes, uint32_t dim, DType dtype) const;

  [[nodiscard]] size_t count() const { return sizes_.size(); }
  [[nodiscard]] KeyList list(size_t l) const {
    if (!arrays_) return {};
    return {arrays_->keys.data() + offsets_[l] * row_bytes_, arrays_->rows.data() + offsets_[l],
            sizes_[l]};
  }
  /// Drops the rows >= row. Rows rise within a list, so each just ends sooner; nothing is copied.
  void truncate(size_t row);
  [[nodiscard]] size_t bytes() const;
  /// The part of bytes() that a copy counts, see cpu/shared.h.
  [[nodiscard]] size_t bytes_of_others() const { return cpu::bytes_of_others(arrays_); }
  /// What bytes() will be for `rows` rows in `lists` lists.
  [[nodiscard]] static size_t estimate(size_t rows, size_t lists, size_t row_bytes);

 private:
  struct Arrays {
    cpu::ReservedBuffer keys;
    std::vector<uint32_t> rows;

    [[nodiscard]] size_t bytes() const { return keys.bytes() + rows.size() * sizeof(uint32_t); }
  };

  cpu::Shared<Arrays> arrays_;     // none: no rows
  std::vector<uint32_t> offsets_;  // where each list begins, in rows
  std::vector<uint32_t> sizes_;
  size_t row_bytes_ = 0;
};

}  // namespace keyhole::index
