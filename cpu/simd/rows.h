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
  size_t stride;        // bytes
  const uint32_t* ids;  // null: contiguous
  size_t count;
  RowScales scales{};  // of int8

  [[gnu::always_inline]] size_t id(size_t i) const { return ids != nullptr ? ids[i] : i; }
  [[gnu::always_inline]] const std::byte* at(size_t i) const { return base + id(i) * stride; }
  /// RowScales::row(i), repeated here because that must not be compiled for a level.
  [[gnu::always_inline]] const uint16_t* scales_at(size_t i) const {
    return scales.data + (scales.first + id(i)) / kScaleRows * scales.stride;
  }
};

template <DType T>
constexpr size_t kElementSize = T == DType::f32 ? 4 : (T == DType::i8 ? 1 : 2);

/// `count` rows of a view whose dtype is T.
template <DType T>
[[gnu::always_inline]] inline Rows rows_of(const RowsView& view, const uint32_t* ids,
                                           size_t count) {
  return {view.data, static_cast<size_t>(view.token_stride) * kElementSize<T>, ids, count,
          view.scales};
}

constexpr size_t kCacheLine = 64;

/// True where rows do not start on cache lines: each reaches into one line more than it has bytes for.
[[gnu::always_inline]] inline bool has_tails(const Rows& rows) {
  return (reinterpret_cast<uintptr_t>(rows.base) | rows.stride) % kCacheLine != 0;
}

/// Far prefetch, from memory into the second-level cache. Into the first level it would hold one of the
/// core's 16 line fill buffers until memory answers, which caps a core at 16 * 64 B per 100 ns = 10 GB/s; the
/// second level has 48 (random rows of 256 B from 256 MiB: 26 ns each by prefetcht0, 20 ns by prefetcht1).
/// Contiguous rows are prefetched too: the hardware's prefetcher alone reaches 0.6 of the bandwidth.
[[gnu::always_inline]] inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

/// Near prefetch, from the second level into the first, some rows before their use (streaming attention of a
/// group of 4: from 0.80 to 0.83 of the read bandwidth, of one head: from 0.91 to 0.98).
[[gnu::always_inline]] inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }

[[gnu::always_inline]] inline void prefetch_row(const std::byte* row, size_t bytes, bool tail) {
  for (size_t offset = 0; offset < bytes; offset += kCacheLine) prefetch_far(row + offset);
  if (tail) prefetch_far(row + bytes - 1);
}

/// Rows that a kernel takes at once. 64 rows of fp16, d = 128 are 16 KiB: K and V of a block fit into L1, and
/// a row that is prefetched a block ahead has some 300 ns to arrive.
constexpr size_t kBlock = 64;

/// How many rows ahead the near prefetch goes.
constexpr size_t kNearKeys = 8;
constexpr size_t kNearValues = 16;

/// Walks over rows block by block, with pointers to the rows of this block and of the next.
class RowBlocks {
 public:
  RowBlocks(const Rows& rows, size_t row_bytes)
      : tails(has_tails(rows)), rows_(rows), row_bytes_(row_bytes) {
    if (rows.count > 0) list(0, 0, 0);
  }

  /// Asks for the first block; the kernels ask for the later ones on their way.
  void prefetch_first() const {
    const size_t n = rows_.count < kBlock ? rows_.count : kBlock;
    for (size_t i = 0; i < n; ++i) prefetch_row(blocks_[0][i], row_bytes_, tails);
  }

  /// Moves to the block that begins at `begin`: 0, kBlock, 2*kBlock, ...
  void advance(size_t begin) {
    current_ = begin / kBlock % 2;
    has_next = begin + kBlock < rows_.count;
    if (has_next) list(begin + kBlock, 1 - current_, kBlock);
  }

  /// The block's rows, then its last row kPadding times: a kernel may compute a full panel, and prefetch
  /// beyond it, without reading a byte that it was not given. The near prefetch must end with the block:
  /// the next one's rows are still in memory (streaming falls from 0.85 to 0.77 of the bandwidth).
  [[nodiscard]] const std::byte* const* current() const { return blocks_[current_]; }
  /// The rows of the next block, its last row repeated, and at least kBlock pointers, because each row of a full
  /// block prefetches one. Precondition: has_next.
  [[nodiscard]] const std::byte* const* next() const { return blocks_[1 - current_]; }
  /// The scales of the rows of current(), where rows are int8.
  [[nodiscard]] const uint16_t* const* scales() const { return scales_[current_]; }

  const bool tails;  ///< see has_tails()
  bool has_next = false;

 private:
  static constexpr size_t kMaxPanel = 16;
  static constexpr size_t kPadding = kMaxPanel + kNearKeys;
  static_assert(kNearValues <= kPadding);

  void list(size_t begin, size_t which, size_t at_least) {
    const std::byte** out = blocks_[which];
    const size_t n = rows_.count - begin < kBlock ? rows_.count - begin : kBlock;
    for (size_t i = 0; i < n; ++i) out[i] = rows_.at(begin + i);
    const size_t end = (n > at_least ? n : at_least) + kPadding;
    for (size_t i = n; i < end; ++i) out[i] = out[n - 1];
    if (rows_.scales.data != nullptr) list_scales(begin, n, scales_[which]);
  }

  void list_scales(size_t begin, size_t n, const uint16_t** out) const {
    for (size_t i = 0; i < n; ++i) {
      out[i] = rows_.scales_at(begin + i);
      // Rows that follow each other find their scales in the cache. row_bytes_ is the number of channels.
      if (rows_.ids == nullptr) continue;
      for (size_t j = 0; j < row_bytes_; j += kCacheLine / sizeof *out[i]) prefetch_far(out[i] + j);
    }
    for (size_t i = n; i < kBlock + kPadding; ++i) out[i] = out[n - 1];
  }

  Rows rows_;
  size_t row_bytes_;
  size_t current_ = 0;
  const std::byte* blocks_[2][kBlock + kPadding];
  const uint16_t* scales_[2][kBlock + kPadding];
};

/// Loads a vector of a row as fp32. scales: those of its channels, where they are int8.
template <class S, DType T>
[[gnu::always_inline]] inline typename S::F load_elements(const std::byte* row,
                                                          const uint16_t* scales) {
  const auto x = S::template load<T>(row);
  if constexpr (T != DType::i8) return x;
  return S::mul(x, S::template load<DType::bf16>(reinterpret_cast<const std::byte*>(scales)));
}

}  // namespace
}  // namespace keyhole::cpu
