// One full layer of a sequence, which attends to all of its tokens:
//
//     [0, sink) resident | [sink, sink + rows) offloaded | the window: resident
//
// so every token is either resident (in the memory of the device, gpu::Resident) or offloaded (in the host's
// OffloadStore), by construction.
#pragma once

#include "runtime/kv/kv_layer.h"
#include "runtime/kv/offload_store.h"
#include "runtime/kv/staging.h"
#include "runtime/save/checksum_io.h"

namespace keyhole::runtime {

/// What the full layers of a sequence have in common.
struct FullLayers {
  const Engine* engine;
  OffloadStore* store;
  gpu::Resident* resident;
  Staging* staging;
  uint32_t max_tokens, sink, window, flush_block;
  uint32_t row_block;  ///< offloaded rows are a multiple of it

  [[nodiscard]] uint32_t window_capacity() const { return window + flush_block; }
};

class FullLayer final : public KvLayer {
 public:
  /// All that it is given outlives it.
  FullLayer(uint32_t layer, FullLayers& all) : layer_(layer), all_(&all) {}

  uint32_t sink() const override { return all_->resident->sink_count(layer_); }
  uint32_t rows() const override { return store().rows(layer_); }
  uint32_t window() const override { return all_->resident->window_count(layer_); }
  uint32_t tokens() const override { return sink() + rows() + window(); }
  bool window_is_full() const override { return window() == all_->window_capacity(); }
  bool offloads() const override { return true; }
  uint32_t reach() const override { return 0; }

  std::optional<uint64_t> more_bytes(uint32_t n) const override;
  void append(const TensorView& k, const TensorView& v) override;
  void drop_newest() override;
  uint32_t oldest() const override { return 0; }
  void read(std::span<const uint32_t> tokens, std::byte* k, std::byte* v) const override;
  Split split(uint32_t tokens) const override;
  void check_truncation(uint32_t /*tokens*/) const override {}
  void truncate(uint32_t tokens) override;
  void check_drop(uint32_t /*left*/, std::optional<uint32_t> /*first_moved*/,
                  uint32_t /*of*/) const override {}
  bool drops_on_device(uint32_t /*newest*/) const override { return true; }
  gpu::Resident& resident() override { return *all_->resident; }
  void set_ahead(uint32_t /*ahead*/) override {}

  /// Takes the memory that append() of n tokens needs. Throws Error(out_of_memory), and then the tokens are what they
  /// were; after it append() does not fail for memory.
  void prepare_append(uint32_t n);
  /// The same for truncate() to the tokens of `kept` and append() of n others, both to come: until then all tokens
  /// stay.
  void prepare_replacement(const Split& kept, uint32_t n);
  /// Whether that gives rows other pages, because copies read those where they lie.
  [[nodiscard]] bool replaces_shared(const Split& kept, uint32_t n) const;
  /// Offloads n of the window's oldest tokens. Throws Error(out_of_memory), and then they are still in the window.
  void offload_from_window(uint32_t n);
  /// The first n staged tokens become offloaded rows, behind those that there are.
  void store_staged(uint32_t n);

  /// Becomes a copy of `from`, the same layer of a sequence with the same parameters, and shares its offloaded rows. It
  /// is empty before.
  void copy_from(const FullLayer& from);
  /// The token counts, the resident K and V `[sink + window, kv_heads, head_dim]`, and per KV head the offloaded K and
  /// V `[rows, head_dim]`; then, where these are int8, the scales of their blocks.
  void save(ChecksumWriter& out) const;
  /// Throws Error(corrupt | io); then it must not be used any more. It is empty before.
  void load(ChecksumReader& in);

 private:
  [[nodiscard]] const OffloadStore& store() const { return *all_->store; }
  [[nodiscard]] OffloadStore& store() { return *all_->store; }
  [[nodiscard]] const cpu::Kernels& kernels() const { return all_->engine->kernels(); }
  [[nodiscard]] LayerShape shape() const { return all_->engine->model().of(layer_); }
  [[nodiscard]] DType dtype() const { return all_->engine->model().kv_dtype; }
  /// Bytes of K, or V, of a token in the model's dtype.
  [[nodiscard]] size_t token_bytes() const { return shape().token_bytes(dtype()); }
  [[nodiscard]] std::byte* staged_k() { return all_->staging->k(); }
  [[nodiscard]] std::byte* staged_v() { return all_->staging->v(); }
  /// Converts n tokens of the input to K and V's dtype.
  void stage(const TensorView& rows, uint32_t begin, uint32_t n, std::byte* to) {
    all_->staging->stage(layer_, rows, begin, n, to);
  }
  /// Tokens that are offloaded when n come to a layer that holds those of `from`.
  [[nodiscard]] uint32_t leaving(const Split& from, uint32_t n) const;
  /// The window's share of n tokens more than it has slots for, in whole blocks.
  [[nodiscard]] uint32_t overflow(uint32_t tokens) const {
    return (tokens - all_->window) / all_->row_block * all_->row_block;
  }
  /// Writes n rows in int8, in whole blocks, behind those that there are; read(which, t, head, to) writes the K
  /// (which = 0) or V (which = 1) of the t-th of them in fp32, on any worker.
  template <class Read>
  void write_blocks(uint32_t n, const Read& read);
  /// A row of `dim` elements of the model's dtype in fp32.
  void read_stored(const std::byte* row, uint32_t dim, float* to) const;
  /// Copies n offloaded rows to the window, which is empty.
  void return_to_window(uint32_t row, uint32_t n);
  void offload_from_input(const TensorView& k, const TensorView& v, uint32_t begin, uint32_t n);
  [[nodiscard]] Split read_counts(ChecksumReader& in);
  void read_rows(ChecksumReader& in, uint32_t rows);
  /// Throws Error(corrupt) where one of n elements of the layer is an infinity or a NaN.
  void check_finite(const std::byte* elements, size_t n, DType dtype) const;
  /// Gives the layer, which is empty, these resident tokens, sink first.
  void fill(const Split& counts, const std::byte* k, const std::byte* v);

  uint32_t layer_;
  FullLayers* all_;
};

}  // namespace keyhole::runtime
