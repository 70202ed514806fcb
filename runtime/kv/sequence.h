// The tokens of one sequence: where each of them lies, and the calls that move them, layer by layer (kv/kv_layer.h).
// Which offloaded rows are indexed, others know (indexing/index_keeper.h).
//
// Where codes stand for the offloaded rows, these come in whole blocks (SessionParams::row_block(), 256
// rows as in cpu/code_layout.h): what is left over waits in the window, and returns to it when a
// truncation cuts a block.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "gpu/device.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/tensor.h"
#include "runtime/kv/full_layer.h"
#include "runtime/kv/offload_store.h"
#include "runtime/kv/sliding_layer.h"
#include "runtime/kv/sliding_rings.h"
#include "runtime/kv/staging.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

class Sequence {
 public:
  /// Of `params`: max_tokens, sink, window, flush_block, row_block() and device_memory_limit. Throws
  /// Error(out_of_memory | out_of_device_memory). The engine outlives it.
  Sequence(const Engine& engine, const SessionParams& params);
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  [[nodiscard]] KvLayer& layer(uint32_t layer) { return *layers_[layer]; }
  [[nodiscard]] const KvLayer& layer(uint32_t layer) const { return *layers_[layer]; }

  // Of a layer, see KvLayer.
  [[nodiscard]] uint32_t sink(uint32_t layer) const { return layers_[layer]->sink(); }
  [[nodiscard]] uint32_t rows(uint32_t layer) const { return store_.rows(layer); }
  [[nodiscard]] uint32_t window(uint32_t layer) const { return layers_[layer]->window(); }
  [[nodiscard]] uint32_t tokens(uint32_t layer) const { return layers_[layer]->tokens(); }
  [[nodiscard]] bool window_is_full(uint32_t layer) const {
    return layers_[layer]->window_is_full();
  }
  using Split = KvLayer::Split;
  [[nodiscard]] Split split(uint32_t layer, uint32_t tokens) const {
    return layers_[layer]->split(tokens);
  }
  void append(uint32_t layer, const TensorView& k, const TensorView& v) {
    layers_[layer]->append(k, v);
  }
  /// Takes the memory that the next n tokens of the layer need: see FullLayer. Sliding layers have theirs.
  void prepare_append(uint32_t layer, uint32_t n) {
    if (full_[layer] != nullptr) full_[layer]->prepare_append(n);
  }
  /// The same where the layer is cut to its first `kept` tokens before, which has not been done yet.
  void prepare_replacement(uint32_t layer, uint32_t kept, uint32_t n) {
    if (full_[layer] != nullptr) full_[layer]->prepare_replacement(split(layer, kept), n);
  }
  [[nodiscard]] bool replaces_shared(uint32_t layer, uint32_t kept, uint32_t n) const {
    return full_[layer] != nullptr && full_[layer]->replaces_shared(split(layer, kept), n);
  }
  void drop_newest(uint32_t layer) { layers_[layer]->drop_newest(); }
  void read(uint32_t layer, std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const {
    layers_[layer]->read(tokens, k, v);
  }
  void truncate(uint32_t layer, uint32_t tokens) { layers_[layer]->truncate(tokens); }

  // Offloaded rows, of full layers.
  /// Offloaded rows are a multiple of it: 1, or those of a block of codes.
  [[nodiscard]] uint32_t row_block() const { return all_full_.row_block; }
  /// K and V of the offloaded rows, of all heads or of one; they stay where they are while rows are added.
  [[nodiscard]] KvView view(uint32_t layer) const { return store_.view(layer); }
  [[nodiscard]] KvView view(uint32_t layer, uint32_t kv_head) const {
    return store_.view(layer).head(kv_head);
  }
  /// Of rows in int8: `[blocks, kv_heads, 2, head_dim]`; else null. See OffloadStore.
  [[nodiscard]] const uint16_t* scales(uint32_t layer) const { return store_.scales(layer); }
  /// See OffloadStore.
  [[nodiscard]] bool is_shared(uint32_t layer, uint32_t row) const {
    return store_.is_shared(layer, row);
  }
  [[nodiscard]] uint32_t common_rows(uint32_t layer, const Sequence& other) const {
    return store_.common_rows(layer, other.store_);
  }
  void set_pinned(uint32_t layer, size_t rows) { store_.set_pinned(layer, rows); }
  /// Offloads a block of the window's oldest tokens, so that a step can append where the window is full.
  void flush(uint32_t layer) { full_[layer]->offload_from_window(row_block()); }

  /// Where the resident tokens of full layers lie.
  [[nodiscard]] gpu::Resident& resident() { return *resident_; }
  // For a device that evicts tokens from the window of a full layer by itself: it writes them to the staging buffers
  // `[window + flush_block, kv_heads, head_dim]` of the model's dtype and the layer's shape, and the first n of them
  // become offloaded rows.
  [[nodiscard]] std::byte* staging_k() { return staging_.k(); }
  [[nodiscard]] std::byte* staging_v() { return staging_.v(); }
  void store_staged(uint32_t layer, uint32_t n) { full_[layer]->store_staged(n); }

  /// Where the tokens of sliding layers lie.
  [[nodiscard]] SlidingRings& rings() { return rings_; }
  [[nodiscard]] const SlidingRings& rings() const { return rings_; }

  /// Bytes of host memory: offloaded rows, sliding windows and staging buffers.
  [[nodiscard]] uint64_t bytes() const { return kv_bytes() + staging_.bytes(); }
  /// Of these, all but the staging buffers.
  [[nodiscard]] uint64_t kv_bytes() const { return store_.bytes() + rings_.bytes(); }
  /// Of the offloaded rows that this sequence counts, those in pages of shared memory.
  [[nodiscard]] uint64_t shared_page_bytes() const { return store_.shared_page_bytes(); }
  /// Of these, rows that another sequence counts, see OffloadStore.
  [[nodiscard]] uint64_t bytes_of_others() const { return store_.bytes_of_others(); }

  /// Becomes a copy of `from`, a sequence with the same parameters, and shares its offloaded rows. It is empty before.
  void copy_from(const Sequence& from);
  /// The full layers, see FullLayer::save(), then the sliding ones, see SlidingRings::save().
  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io); then it must not be used any more. It is empty before.
  void load(ChecksumReader& in);

 private:
  OffloadStore store_;
  std::unique_ptr<gpu::Resident> resident_;
  SlidingRings rings_;
  Staging staging_;
  FullLayers all_full_;
  std::vector<std::unique_ptr<KvLayer>> layers_;
  std::vector<FullLayer*> full_;  ///< [layer], of layers_; null: the layer slides
};

}  // namespace keyhole::runtime
