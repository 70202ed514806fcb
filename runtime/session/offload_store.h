// Host memory for the K and V of offloaded tokens: per (layer, KV head) two arrays `[rows,
// head_dim]` that never move while they grow, so that indexes can keep views of them.
#pragma once

#include <vector>

#include "cpu/memory.h"
#include "cpu/types.h"

namespace keyhole::runtime {

class OffloadStore {
 public:
  /// Reserves address space for `capacity` rows per head; memory is taken as rows are written.
  /// Throws Error(out_of_memory).
  OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype, size_t capacity);

  [[nodiscard]] size_t capacity() const { return capacity_; }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return rows_[layer]; }
  [[nodiscard]] size_t row_bytes() const { return row_bytes_; }

  /// Rows [0, rows(layer)) of one head.
  [[nodiscard]] KvView view(uint32_t layer, uint32_t kv_head) const;

  /// Adding n rows: prepare(), write them through key() and value() for every head, then grow().
  void prepare(uint32_t layer, uint32_t n);
  [[nodiscard]] std::byte* key(uint32_t layer, uint32_t kv_head, size_t row);
  [[nodiscard]] std::byte* value(uint32_t layer, uint32_t kv_head, size_t row);
  void grow(uint32_t layer, uint32_t n) { rows_[layer] += n; }

  /// The first `pinned` rows of the layer's arrays are pinned, whether they are held or not: their memory is not given
  /// back.
  void set_pinned(uint32_t layer, size_t pinned) { pinned_[layer] = pinned; }
  /// Drops rows >= rows and gives their memory back.
  void truncate(uint32_t layer, uint32_t rows);

  /// Bytes of the rows held, all layers.
  [[nodiscard]] size_t bytes() const;

 private:
  /// Byte offset of a head's K (which = 0) or V (which = 1).
  [[nodiscard]] size_t offset(uint32_t layer, uint32_t kv_head, uint32_t which) const {
    return ((size_t{layer} * kv_heads_ + kv_head) * 2 + which) * array_bytes_;
  }

  uint32_t kv_heads_;
  uint32_t head_dim_;
  DType dtype_;
  size_t capacity_;
  size_t row_bytes_;
  size_t array_bytes_;  ///< reserved for the K or V of one head, whole huge pages
  // One mapping for all heads: hundreds of them would come near the system's limit on mappings.
  cpu::ReservedBuffer memory_;
  std::vector<uint32_t> rows_;  ///< [layer]
  std::vector<size_t> pinned_;  ///< [layer] rows
};

}  // namespace keyhole::runtime
