// The host's copy of the resident tokens of a session on a device: a token that leaves the window is here
// already, so that nothing is ever copied back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/ring.h"
#include "gpu/step.h"

namespace keyhole::gpu {

/// Rows of all layers in ordinary memory, whose pages the operating system maps when they are first written (a window
/// of 131072 tokens in 32 layers is 16 GiB of address space from the start, and of memory when it is full). One thread
/// at a time. Tokens come and go as rows `[n, row_bytes]` of K and of V.
class Mirror {
 public:
  /// Throws Error(out_of_memory) where the address space cannot be reserved.
  Mirror(const RingShape& shape, uint32_t layers, size_t row_bytes);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  [[nodiscard]] const RingState& state(uint32_t layer) const { return states_[layer]; }

  void append_sink(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n);
  void append_window(uint32_t layer, const std::byte* k, const std::byte* v, uint32_t n);
  /// Copies the oldest n window tokens to k and v, and drops them.
  void evict(uint32_t layer, std::byte* k, std::byte* v, uint32_t n);
  void truncate(uint32_t layer, uint32_t sink, uint32_t window);
  /// What a step that appends one token does (after_step()): those that leave are copied to k and v; returns
  /// how many.
  uint32_t update_host_copy(uint32_t layer, const std::byte* new_k, const std::byte* new_v,
                            std::byte* k, std::byte* v);
  /// Of the newest `of` tokens those remain that `kept` names, rising numbers below `of`.
  void keep_newest(uint32_t layer, uint32_t of, std::span<const uint32_t> kept);
  /// Copies tokens [first, first + n) of the layer (sink first, oldest first) to k and v.
  void read(uint32_t layer, uint32_t first, uint32_t n, std::byte* k, std::byte* v) const;
  /// piece(first slot, tokens) for each of the up to three pieces that the layer's tokens lie in, oldest first.
  template <class F>
  void for_pieces(uint32_t layer, F&& piece) const {
    const RingState& state = states_[layer];
    const uint32_t to_the_end = std::min(state.window, shape_.capacity - state.begin);
    if (state.sink != 0) piece(0U, state.sink);
    if (to_the_end != 0) piece(shape_.sink + state.begin, to_the_end);
    if (state.window != to_the_end) piece(shape_.sink, state.window - to_the_end);
  }
  /// The resident tokens where they lie, each a row that `heads` heads of `dim` elements of `dtype` share.
  [[nodiscard]] KvPieces rows(uint32_t layer, uint32_t heads, uint32_t dim, DType dtype) const;

 private:
  [[nodiscard]] std::byte* row(uint32_t layer, uint32_t slot, uint32_t which) const;
  void write(uint32_t layer, uint32_t slot, const std::byte* k, const std::byte* v);

  RingShape shape_;
  size_t row_bytes_;
  size_t bytes_;
  std::byte* data_ = nullptr;
  std::vector<RingState> states_;
};

}  // namespace keyhole::gpu
