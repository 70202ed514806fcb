// Host memory for the K and V of offloaded tokens: per (layer, KV head) two arrays `[rows,
// head_dim]` that never move while they grow, so that indexes can keep views of them.
//
// A copy of a session shares the pages of the rows that there are (cpu/shared_arrays.h): each owns what it adds, and who
// cuts shared rows and adds others takes pages of its own for them.
//
// Rows of dtype i8 come in blocks of kScaleRows, each with its own scales: per layer one array `[blocks, kv_heads, 2,
// head_dim]` of bf16, of K and then of V, that does not move either.
#pragma once

#include <vector>

#include "cpu/quantise.h"
#include "cpu/shared_arrays.h"
#include "cpu/types.h"

namespace keyhole::cpu {
class Pool;
}

namespace keyhole::runtime {

class OffloadStore {
 public:
  /// Reserves address space for `capacity` rows per head; memory is taken as rows are written.
  /// pool: that takes part in taking much of it at once, and outlives the store; null: nobody. Throws Error(out_of_memory).
  OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype, size_t capacity,
               cpu::Pool* pool = nullptr);

  [[nodiscard]] size_t capacity() const { return capacity_; }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return rows_[layer]; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] size_t row_bytes() const { return row_bytes_; }

  /// Rows [0, rows(layer)) of one head.
  [[nodiscard]] KvView view(uint32_t layer, uint32_t kv_head) const;

  /// Adding n rows: prepare(), write them through key() and value(), or write_block(), for every head, then grow().
  /// prepare() throws Error(out_of_memory), and then the rows are what they were.
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
  /// is not given back. Where fewer are than before, what is neither pinned nor held goes back, else it throws as
  /// prepare().
  void set_pinned(uint32_t layer, size_t pinned);
  /// Drops rows >= rows and gives their memory back. Rows that are i8 are cut between blocks.
  void truncate(uint32_t layer, uint32_t rows);
  /// Gives the layer, which is empty, the rows of `from`, a store of the same shape that nobody uses meanwhile. Throws
  /// Error(out_of_memory).
  void share(uint32_t layer, const OffloadStore& from);
  /// Whether other rows in the place of those from `row` on would lie on other pages: those that are there, others read,
  /// too. What is pinned of them must be unpinned before.
  [[nodiscard]] bool is_shared(uint32_t layer, uint32_t row) const;

  /// Bytes of the rows held, all layers, whether others share them or not.
  [[nodiscard]] size_t bytes() const;
  /// Of these, those that another store counts: of rows that several share, the first that still has them does.
  [[nodiscard]] size_t bytes_of_others() const;

 private:
  /// Number of a head's K (which = 0) or V (which = 1) among the layer's arrays.
  [[nodiscard]] static size_t array(uint32_t kv_head, uint32_t which) {
    return size_t{kv_head} * 2 + which;
  }
  /// Numbers between the scales of a block and of the next one.
  [[nodiscard]] size_t scale_stride() const { return size_t{2} * kv_heads_ * head_dim_; }
  [[nodiscard]] size_t scale_bytes(size_t rows) const {
    return scale_count(rows) * sizeof(uint16_t);
  }
  /// Rows [from, to) are about to be written, or their memory to be pinned.
  void take(uint32_t layer, size_t from, size_t to);
  /// Gives the memory of rows from `from` on back.
  void release(uint32_t layer, size_t from);
  [[nodiscard]] uint16_t* scales_at(uint32_t layer, uint32_t kv_head, uint32_t which,
                                    size_t row) const {
    return reinterpret_cast<uint16_t*>(scales_.at(layer, 0)) + row / kScaleRows * scale_stride() +
           (size_t{kv_head} * 2 + which) * head_dim_;
  }

  cpu::Pool* pool_;
  uint32_t kv_heads_;
  uint32_t head_dim_;
  DType dtype_;
  size_t capacity_;
  size_t row_bytes_;
  cpu::SharedArrays arrays_;    ///< per layer K and V of each head
  cpu::SharedArrays scales_;    ///< per layer one array
  std::vector<uint32_t> rows_;  ///< [layer]
  std::vector<size_t> pinned_;  ///< [layer] rows
};

}  // namespace keyhole::runtime
