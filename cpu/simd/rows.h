// Rows to visit, contiguous or gathered, and their prefetch.
//
// Everything in cpu/simd/ is in anonymous namespaces on purpose: each header is compiled once per level
// with that level's instructions, and a shared inline function could be the copy that the linker keeps for
// machines that lack them.
#pragma once

#include "cpu/kernels.h"

namespace keyhole::cpu {
namespace {

constexpr size_t round_up_to(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Rows {
  const std::byte* base;
  size_t stride;
  const uint32_t* ids;  // null: contiguous
  size_t count;

  [[gnu::always_inline]] size_t id(size_t i) const { return ids != nullptr ? ids[i] : i; }
  [[gnu::always_inline]] const std::byte* at(size_t i) const { return base + id(i) * stride; }

  /// n rows from `begin` on; beyond the end the last row again, so that a kernel may compute a full panel
  /// without reading a byte that it was not given. Precondition: count > 0.
  template <size_t n>
  [[gnu::always_inline]] void panel(size_t begin, const std::byte* (&out)[n]) const {
    if (begin + n <= count) {
      for (size_t k = 0; k < n; ++k) out[k] = at(begin + k);
    } else {
      for (size_t k = 0; k < n; ++k) out[k] = at(begin + k < count ? begin + k : count - 1);
    }
  }
};

constexpr size_t kCacheLine = 64;

/// True where rows do not start on cache lines: each reaches into one line more than it has bytes for.
[[gnu::always_inline]] inline bool has_tails(const Rows& rows) {
  return (reinterpret_cast<uintptr_t>(rows.base) | rows.stride) % kCacheLine != 0;
}

[[gnu::always_inline]] inline void prefetch_row(const std::byte* row, size_t bytes, bool tail) {
  for (size_t offset = 0; offset < bytes; offset += kCacheLine) {
    __builtin_prefetch(row + offset, 0, 3);
  }
  if (tail) __builtin_prefetch(row + bytes - 1, 0, 3);
}

/// Rows that a kernel takes at once. 64 rows of fp16, d = 128 are 16 KiB: K and V of a block fit into L1, and
/// a row that is prefetched a block ahead has some 300 ns to arrive.
constexpr size_t kBlock = 64;

/// Walks over rows block by block, with the next block's rows to prefetch.
class RowBlocks {
 public:
  RowBlocks(const Rows& rows, size_t row_bytes, bool prefetch)
      : tails(has_tails(rows)), rows_(rows), prefetch_(prefetch) {
    if (rows.count > 0) rows.panel(0, blocks_[0]);
    for (size_t i = 0; prefetch && i < kBlock && i < rows.count; ++i) {
      prefetch_row(blocks_[0][i], row_bytes, tails);
    }
  }
  /// Moves to the block that begins at `begin`: 0, kBlock, 2*kBlock, ...
  void advance(size_t begin) {
    current_ = begin / kBlock % 2;
    more_ = begin + kBlock < rows_.count;
    if (more_) rows_.panel(begin + kBlock, blocks_[1 - current_]);
  }
  [[nodiscard]] const std::byte* const* rows(size_t i) const { return blocks_[current_] + i; }
  [[nodiscard]] const std::byte* const* ahead(size_t i) const {
    return prefetch_ && more_ ? blocks_[1 - current_] + i : nullptr;
  }

  const bool tails;  ///< see has_tails()

 private:
  Rows rows_;
  bool prefetch_;
  bool more_ = false;
  size_t current_ = 0;
  const std::byte* blocks_[2][kBlock];
};

template <DType T>
constexpr size_t kElementSize = T == DType::f32 ? 4 : 2;

}  // namespace
}  // namespace keyhole::cpu
