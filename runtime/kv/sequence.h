// The tokens of one sequence: where each of them lies, and the calls that move them. Of every layer
//
//     [0, sink) resident | [sink, sink + rows) offloaded | the window: resident
//
// so every token is either resident (in the memory of the device, gpu::Resident) or offloaded (in
// the host's OffloadStore), by construction. Which offloaded rows are indexed, others know
// (indexing/index_keeper.h).
//
// A sliding layer has a ring in host memory instead (kv/sliding_rings.h), and nothing offloaded.
//
// Where codes stand for the offloaded rows, these come in whole blocks (SessionParams::row_block(), 256
// rows as in cpu/code_layout.h): what is left over waits in the window, and returns to it when a
// truncation cuts a block.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cpu/memory.h"
#include "gpu/device.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"
#include "runtime/kv/offload_store.h"
#include "runtime/kv/sliding_rings.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

class Sequence {
 public:
  /// Of `params`: max_tokens, sink, window, flush_block, row_block() and device_memory_limit. Throws
  /// Error(out_of_memory | out_of_device_memory). The engine outlives it.
  Sequence(const Engine& engine, const SessionParams& params);

  [[nodiscard]] bool slides(uint32_t layer) const { return engine_->model().slides(layer); }
  [[nodiscard]] uint32_t sink(uint32_t layer) const {
    return slides(layer) ? 0 : resident_->sink_count(layer);
  }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return store_.rows(layer); }
  /// Of a sliding layer the tokens that it attends to.
  [[nodiscard]] uint32_t window(uint32_t layer) const {
    return slides(layer) ? rings_.window_count(layer) : resident_->window_count(layer);
  }
  /// Of a sliding layer all that have come.
  [[nodiscard]] uint32_t tokens(uint32_t layer) const {
    return slides(layer) ? rings_.tokens(layer) : sink(layer) + rows(layer) + window(layer);
  }
  /// Offloaded rows are a multiple of it: 1, or those of a block of codes.
  [[nodiscard]] uint32_t row_block() const { return row_block_; }
  /// The next token makes the window fall back to its `window` newest; the others are offloaded.
  [[nodiscard]] bool window_is_full(uint32_t layer) const {
    return !slides(layer) && window(layer) == window_capacity();
  }
  /// K and V of the offloaded rows; they stay where they are while rows are added.
  [[nodiscard]] KvView view(uint32_t layer, uint32_t kv_head) const {
    return store_.view(layer, kv_head);
  }
  /// Of rows in int8: `[blocks, kv_heads, 2, head_dim]`; else null. See OffloadStore.
  [[nodiscard]] const uint16_t* scales(uint32_t layer) const { return store_.scales(layer); }
  [[nodiscard]] gpu::Resident& resident() { return *resident_; }
  /// Where the layer's resident tokens, or those of its sliding window, lie.
  [[nodiscard]] gpu::Resident& resident_of(uint32_t layer) {
    if (slides(layer)) return rings_;
    return *resident_;
  }
  [[nodiscard]] SlidingRings& rings() { return rings_; }
  [[nodiscard]] const SlidingRings& rings() const { return rings_; }

  /// Appends the tokens of k and v, which hold equally many, all finite, and no more than
  /// max_tokens allows.
  void append(uint32_t layer, const RowsIn& k, const RowsIn& v);
  /// Offloads a block of the window's oldest tokens, so that a step can append where the window is full.
  void flush(uint32_t layer) { offload_from_window(layer, row_block_); }
  /// Takes the newest token away, which is resident: the one that a failed step has appended.
  void drop_newest(uint32_t layer);

  /// Copies some tokens, which of a sliding layer are still here, as they are held, in the model's dtype, to k and v `[tokens, kv_heads, head_dim]`.
  void read(uint32_t layer, std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const;

  /// How many tokens of each kind remain of the first `tokens`. Of a sliding layer: none of these.
  struct Split {
    uint32_t sink = 0, rows = 0, window = 0;
  };
  [[nodiscard]] Split split(uint32_t layer, uint32_t tokens) const;
  /// Forgets all tokens but the first `tokens`. Of a sliding layer SlidingRings::can_truncate() says so.
  void truncate(uint32_t layer, uint32_t tokens);

  /// Rows of a head that there can be at most.
  [[nodiscard]] size_t row_capacity() const { return store_.capacity(); }
  /// See OffloadStore.
  [[nodiscard]] bool is_shared(uint32_t layer, uint32_t row) const {
    return store_.is_shared(layer, row);
  }
  [[nodiscard]] uint32_t common_rows(uint32_t layer, const Sequence& other) const {
    return store_.common_rows(layer, other.store_);
  }
  void set_pinned(uint32_t layer, size_t rows) { store_.set_pinned(layer, rows); }

  // For a device that evicts tokens from its window by itself: it writes them to the staging
  // buffers `[window + flush_block, kv_heads, head_dim]` of the model's dtype and the layer's shape, and the first n of them
  // become offloaded rows.
  [[nodiscard]] std::byte* staging_k() { return staging_k_.data(); }
  [[nodiscard]] std::byte* staging_v() { return staging_v_.data(); }
  void store_staged(uint32_t layer, uint32_t n);

  /// Bytes of host memory: offloaded rows, sliding windows and staging buffers.
  [[nodiscard]] uint64_t bytes() const {
    return store_.bytes() + rings_.bytes() + staging_k_.bytes() + staging_v_.bytes();
  }
  /// Of these, rows that another sequence counts, see OffloadStore.
  [[nodiscard]] uint64_t bytes_of_others() const { return store_.bytes_of_others(); }

  /// Becomes a copy of `from`, a sequence with the same parameters, and shares its offloaded rows. It is empty before.
  void copy_from(const Sequence& from);
  /// Per layer that does not slide the token counts, the resident K and V `[sink + window, kv_heads, head_dim]`, and
  /// per KV head the offloaded K and V `[rows, head_dim]`; then, where these are int8, the scales of their blocks. Then
  /// the sliding layers, see SlidingRings.
  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io); then it must not be used any more. It is empty before.
  void load(ChecksumReader& in);

 private:
  [[nodiscard]] uint32_t window_capacity() const { return window_ + flush_block_; }
  [[nodiscard]] LayerShape shape(uint32_t layer) const { return engine_->model().of(layer); }
  [[nodiscard]] DType dtype() const { return engine_->model().kv_dtype; }
  /// Of the model's dtype.
  [[nodiscard]] size_t row_bytes(uint32_t layer) const { return shape(layer).row_bytes(dtype()); }
  [[nodiscard]] size_t token_bytes(uint32_t layer) const {
    return shape(layer).token_bytes(dtype());
  }
  /// Converts n tokens of the input to K and V's dtype.
  void stage(uint32_t layer, const RowsIn& rows, uint32_t begin, uint32_t n, std::byte* to);
  /// The window's share of n tokens more than it has slots for, in whole blocks.
  [[nodiscard]] uint32_t overflow(uint32_t tokens) const {
    return (tokens - window_) / row_block_ * row_block_;
  }
  void append_to_ring(uint32_t layer, const RowsIn& k, const RowsIn& v);
  void offload_from_window(uint32_t layer, uint32_t n);
  /// Writes n rows in int8, in whole blocks, behind those that there are; read(which, t, head, to) writes the K
  /// (which = 0) or V (which = 1) of the t-th of them in fp32, on any worker.
  template <class Read>
  void write_blocks(uint32_t layer, uint32_t n, const Read& read);
  /// A row of `dim` elements of the model's dtype in fp32.
  void read_stored(const std::byte* row, uint32_t dim, float* to) const;
  /// Copies n offloaded rows to the window, which is empty.
  void return_to_window(uint32_t layer, uint32_t row, uint32_t n);
  void offload_from_input(uint32_t layer, const RowsIn& k, const RowsIn& v, uint32_t begin,
                          uint32_t n);
  /// Throws Error(corrupt) where one of n elements of the layer is an infinity or a NaN.
  void check_finite(uint32_t layer, const std::byte* elements, size_t n, DType dtype) const;
  /// Gives an empty layer these resident tokens, sink first.
  void fill(uint32_t layer, const Split& counts, const std::byte* k, const std::byte* v);

  const Engine* engine_;
  uint32_t layers_;
  uint32_t max_tokens_, sink_, window_, flush_block_;
  uint32_t row_block_;  ///< offloaded rows are a multiple of it
  OffloadStore store_;
  std::unique_ptr<gpu::Resident> resident_;
  SlidingRings rings_;
  // Address space for the longest window that the config allows; memory comes as tokens do.
  cpu::ReservedBuffer staging_k_, staging_v_;
};

}  // namespace keyhole::runtime
