// Host memory for the K and V of offloaded tokens: per (layer, KV head) two arrays `[rows,
// head_dim]` that never move while they grow, so that indexes can keep views of them.
//
// Rows of dtype i8 come in blocks of kScaleRows, each with its own scales: per layer one array `[blocks, kv_heads, 2,
// head_dim]` of bf16, of K and then of V, that does not move either.
#pragma once

#include <vector>

#include "cpu/memory.h"
#include "cpu/quantise.h"
#include "cpu/types.h"

namespace keyhole::runtime {

class OffloadStore {
 public:
  /// Reserves address space for `capacity` rows per head; memory is taken as rows are written.
  /// Throws Error(out_of_memory).
  OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype, size_t capacity);

  [[nodiscard]] size_t capacity() const { return capacity_; }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return rows_[layer]; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] size_t row_bytes() const { return row_bytes_; }

  /// Rows [0, rows(layer)) of one head.
  [[nodiscard]] KvView view(uint32_t layer, uint32_t kv_head) const;

  /// Adding n rows: prepare(), write them through key() and value(), or write_block(), for every head, then grow().
  void prepare(uint32_t layer, uint32_t n);
  [[nodiscard]] std::byte* key(uint32_t layer, uint32_t kv_head, size_t row);
  [[nodiscard]] std::byte* value(uint32_t layer, uint32_t kv_head, size_t row);
  /// Of dtype i8: quantises the kScaleRows rows from `row` on, a multiple of kScaleRows, of a head's K (which = 0) or V
  /// (which = 1). read(i, to) writes row i of them in fp32, each twice; most: see cpu::ChannelQuantiser.
  template <class Read>
  void write_block(uint32_t layer, uint32_t kv_head, uint32_t which, size_t row, float most,
                   const Read& read) {
    float x[kMaxHeadDim];
    cpu::ChannelQuantiser quantiser(head_dim_);
    for (uint32_t i = 0; i < kScaleRows; ++i) {
      read(i, x);
      quantiser.look(x);
    }
    quantiser.choose_scales(most, scales_at(layer, kv_head, which, row));
    auto* to = reinterpret_cast<int8_t*>(which == 0 ? key(layer, kv_head, row)
                                                    : value(layer, kv_head, row));
    for (uint32_t i = 0; i < kScaleRows; ++i) {
      read(i, x);
      quantiser.write(x, to + i * row_bytes_);
    }
  }
  void grow(uint32_t layer, uint32_t n) { rows_[layer] += n; }

  /// Scales of the layer's blocks, `[blocks, kv_heads, 2, head_dim]` bf16; null where rows are not i8.
  [[nodiscard]] uint16_t* scales(uint32_t layer) const {
    return dtype_ == DType::i8 ? scales_at(layer, 0, 0, 0) : nullptr;
  }
  /// Numbers that scales() has for `rows` rows.
  [[nodiscard]] size_t scale_count(size_t rows) const {
    return dtype_ == DType::i8 ? (rows + kScaleRows - 1) / kScaleRows * scale_stride() : 0;
  }

  /// The first `pinned` rows of the layer's arrays are pinned, or about to be, whether they are held or not: their memory
  /// is not given back. Where fewer are than before, what is neither pinned nor held goes back.
  void set_pinned(uint32_t layer, size_t pinned);
  /// Drops rows >= rows and gives their memory back. Rows that are i8 are cut between blocks.
  void truncate(uint32_t layer, uint32_t rows);

  /// Bytes of the rows held, all layers.
  [[nodiscard]] size_t bytes() const;

 private:
  /// Byte offset of a head's K (which = 0) or V (which = 1).
  [[nodiscard]] size_t offset(uint32_t layer, uint32_t kv_head, uint32_t which) const {
    return ((size_t{layer} * kv_heads_ + kv_head) * 2 + which) * array_bytes_;
  }
  /// Numbers between the scales of a block and of the next one.
  [[nodiscard]] size_t scale_stride() const { return size_t{2} * kv_heads_ * head_dim_; }
  /// The layer's arrays are about to be touched up to row `after`, and were up to row `before`.
  void advise_pages(uint32_t layer, size_t before, size_t after);
  /// Gives the memory of rows [from, to) of the layer's arrays back.
  void release(uint32_t layer, size_t from, size_t to);
  [[nodiscard]] uint16_t* scales_at(uint32_t layer, uint32_t kv_head, uint32_t which,
                                    size_t row) const {
    return reinterpret_cast<uint16_t*>(scales_.data() + layer * layer_scale_bytes_) +
           row / kScaleRows * scale_stride() + (size_t{kv_head} * 2 + which) * head_dim_;
  }

  uint32_t kv_heads_;
  uint32_t head_dim_;
  DType dtype_;
  size_t capacity_;
  size_t row_bytes_;
  size_t array_bytes_;        ///< reserved for the K or V of one head, whole huge pages
  size_t layer_scale_bytes_;  ///< reserved for the scales of one layer, whole pages
  // One mapping for all heads: hundreds of them would come near the system's limit on mappings.
  cpu::ReservedBuffer memory_;
  cpu::ReservedBuffer scales_;
  std::vector<uint32_t> rows_;  ///< [layer]
  std::vector<size_t> pinned_;  ///< [layer] rows
};

}  // namespace keyhole::runtime
