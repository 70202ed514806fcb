// Host memory for the K and V of offloaded tokens: per (layer, KV head) two arrays `[rows,
// head_dim]` that never move while they grow, so that indexes can keep views of them.
//
// A copy of a session shares the pages of the rows that there are (cpu/shared_arrays.h): each owns what it adds, and
// who cuts shared rows and adds others takes pages of its own for them.
//
// Rows of dtype i8 come in blocks of kScaleRows, each with its own scales: per layer one array `[blocks, kv_heads, 2,
// head_dim]` of bf16, of K and then of V, that does not move either.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/layer_shape.h"
#include "cpu/quantise.h"
#include "cpu/shared_arrays.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"

namespace keyhole::cpu {
class Pool;
}

namespace keyhole::runtime {

class OffloadStore {
 public:
  /// Reserves address space for `capacity` rows per head; memory is taken as rows are written.
  /// pool: that takes part in taking much of it at once, and outlives the store; null: nobody. Throws
  /// Error(out_of_memory). shapes: `[layers]`, of which kv_heads and head_dim count.
  OffloadStore(std::span<const LayerShape> shapes, DType dtype, size_t capacity,
               cpu::Pool* pool = nullptr);
  /// Of layers that are alike.
  OffloadStore(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, DType dtype, size_t capacity,
               cpu::Pool* pool = nullptr)
      : OffloadStore(std::vector<LayerShape>(layers, {kv_heads, kv_heads, head_dim, head_dim}),
                     dtype, capacity, pool) {}

  [[nodiscard]] size_t capacity() const { return capacity_; }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return layers_[layer].rows; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] size_t row_bytes(uint32_t layer) const {
    return layers_[layer].kind->head_dim * dtype_size(dtype_);
  }

  /// Bytes that so many rows of the layer take, K and V of all heads with their scales.
  [[nodiscard]] uint64_t bytes_of(uint32_t layer, uint64_t rows) const {
    return uint64_t{2} * layers_[layer].kind->kv_heads * rows * row_bytes(layer) +
           scale_bytes(layer, rows);
  }

  /// Rows [0, rows(layer)) of all heads, which lie without gaps in each.
  [[nodiscard]] KvView view(uint32_t layer) const;

  /// Adding n rows: prepare(), write them through key() and value(), or write_block(), for every head, then grow().
  /// prepare() throws Error(out_of_memory), and then the rows are what they were.
  void prepare(uint32_t layer, uint32_t n);
  /// The same for n rows in the place of those from `row` on, which stay until truncate() cuts them off; after that
  /// prepare() of these n does not fail. What is pinned of rows that is_shared() tells of must be unpinned before.
  void prepare_in_place(uint32_t layer, uint32_t row, uint32_t n);
  [[nodiscard]] std::byte* key(uint32_t layer, uint32_t kv_head, size_t row);
  [[nodiscard]] std::byte* value(uint32_t layer, uint32_t kv_head, size_t row);
  /// Of dtype i8: quantises the kScaleRows rows from `row` on, a multiple of kScaleRows, of a head's K (which = 0) or V
  /// (which = 1). read(i, to) writes row i of them in fp32, each twice; most: see cpu::ChannelQuantiser.
  template <class Read>
  void write_block(uint32_t layer, uint32_t kv_head, uint32_t which, size_t row, float most,
                   const Read& read) {
    float x[kMaxHeadDim];
    cpu::ChannelQuantiser quantiser(layers_[layer].kind->head_dim);
    for (uint32_t i = 0; i < kScaleRows; ++i) {
      read(i, x);
      quantiser.look(x);
    }
    quantiser.choose_scales(most, scales_at(layer, kv_head, which, row));
    auto* to = reinterpret_cast<int8_t*>(which == 0 ? key(layer, kv_head, row)
                                                    : value(layer, kv_head, row));
    for (uint32_t i = 0; i < kScaleRows; ++i) {
      read(i, x);
      quantiser.write(x, to + i * row_bytes(layer));
    }
  }
  void grow(uint32_t layer, uint32_t n) { layers_[layer].rows += n; }

  /// Scales of the layer's blocks, `[blocks, kv_heads, 2, head_dim]` bf16; null where rows are not i8.
  [[nodiscard]] uint16_t* scales(uint32_t layer) const {
    return dtype_ == DType::i8 ? scales_at(layer, 0, 0, 0) : nullptr;
  }
  /// Numbers that the layer's scales() has for `rows` rows.
  [[nodiscard]] size_t scale_count(uint32_t layer, size_t rows) const {
    return dtype_ == DType::i8 ? (rows + kScaleRows - 1) / kScaleRows * scale_stride(layer) : 0;
  }

  /// The first `pinned` rows of the layer's arrays are pinned, or about to be, whether they are held or not: their
  /// memory is not given back. Where fewer are than before, what is neither pinned nor held goes back, else it throws
  /// as prepare().
  void set_pinned(uint32_t layer, size_t pinned);
  /// Drops rows >= rows and gives their memory back. Rows that are i8 are cut between blocks.
  void truncate(uint32_t layer, uint32_t rows);
  /// Gives the layer, which is empty, the rows of `from`, a store of the same shape that nobody uses meanwhile. Throws
  /// Error(out_of_memory).
  void share(uint32_t layer, const OffloadStore& from);
  /// Whether other rows in the place of those from `row` on would lie on other pages: those that are there, others
  /// read, too. What is pinned of them must be unpinned before.
  [[nodiscard]] bool is_shared(uint32_t layer, uint32_t row) const;

  /// Rows [0, n) of the layer are in both stores, which have the same shape, the same memory.
  [[nodiscard]] uint32_t common_rows(uint32_t layer, const OffloadStore& other) const;

  /// Bytes of the rows held, all layers, whether others share them or not.
  [[nodiscard]] size_t bytes() const;
  /// Of these, those that another store counts: of rows that several share, the first that still has them does.
  [[nodiscard]] size_t bytes_of_others() const;
  /// bytes() without bytes_of_others(), as far as they lie in pages of shared memory, as nearly all do.
  [[nodiscard]] size_t shared_page_bytes() const;

 private:
  /// The memory of layers that are alike.
  struct Kind {
    Kind(uint32_t layers, uint32_t heads, uint32_t dim, DType dtype, size_t capacity);

    uint32_t kv_heads, head_dim;
    cpu::SharedArrays arrays;  ///< per layer K and V of each head
    cpu::SharedArrays scales;  ///< per layer one array
  };
  struct Layer {
    Kind* kind = nullptr;
    uint32_t place = 0;  ///< among those of its kind
    uint32_t rows = 0;
    size_t pinned = 0;  ///< rows
  };
  /// Number of a head's K (which = 0) or V (which = 1) among the layer's arrays.
  [[nodiscard]] static size_t array(uint32_t kv_head, uint32_t which) {
    return size_t{kv_head} * 2 + which;
  }
  /// Numbers between the scales of a block and of the next one.
  [[nodiscard]] size_t scale_stride(uint32_t layer) const {
    return size_t{2} * layers_[layer].kind->kv_heads * layers_[layer].kind->head_dim;
  }
  [[nodiscard]] size_t scale_bytes(uint32_t layer, size_t rows) const {
    return scale_count(layer, rows) * sizeof(uint16_t);
  }
  /// Rows [from, to) are about to be written, or their memory to be pinned; of those from `from` on, the ones before
  /// `kept` stay what they are.
  void take(uint32_t layer, size_t from, size_t to, size_t kept = 0);
  /// Gives the memory of rows from `from` on back.
  void release(uint32_t layer, size_t from);
  [[nodiscard]] uint16_t* scales_at(uint32_t layer, uint32_t kv_head, uint32_t which,
                                    size_t row) const {
    const Layer& l = layers_[layer];
    return reinterpret_cast<uint16_t*>(l.kind->scales.at(l.place, 0)) +
           row / kScaleRows * scale_stride(layer) +
           (size_t{kv_head} * 2 + which) * l.kind->head_dim;
  }

  cpu::Pool* pool_;
  DType dtype_;
  size_t capacity_;
  std::vector<std::unique_ptr<Kind>> kinds_;
  std::vector<Layer> layers_;
};

}  // namespace keyhole::runtime
