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
  [[gnu::always_inline]] void list(size_t begin, size_t n, const std::byte** out) const {
    const size_t whole = begin + n <= count ? n : count - begin;
    for (size_t k = 0; k < whole; ++k) out[k] = at(begin + k);
    for (size_t k = whole; k < n; ++k) out[k] = at(count - 1);
  }
};

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

/// How many rows ahead the near prefetch goes, at most.
constexpr size_t kNear = 16;

/// Walks over rows block by block: pointers to this block's rows, and to the next one's.
class RowBlocks {
 public:
  RowBlocks(const Rows& rows, size_t row_bytes)
      : tails(has_tails(rows)), rows_(rows), row_bytes_(row_bytes) {
    if (rows.count > 0) rows.list(0, kBlock, blocks_[0]);
  }

  /// Asks for the first block; the kernels ask for the later ones on their way.
  void prefetch_first() const {
    for (size_t i = 0; i < kBlock && i < rows_.count; ++i)
      prefetch_row(blocks_[0][i], row_bytes_, tails);
  }

  /// Moves to the block that begins at `begin`: 0, kBlock, 2*kBlock, ...
  void advance(size_t begin) {
    current_ = begin / kBlock % 2;
    has_next = begin + kBlock < rows_.count;
    if (has_next) rows_.list(begin + kBlock, kBlock, blocks_[1 - current_]);
    // The near prefetch ends with the block: the next one's rows are still in memory, and fetching them
    // from there into L1 is what it must not do (streaming falls from 0.85 to 0.77 of the bandwidth).
    for (size_t i = 0; i < kNear; ++i)
      blocks_[current_][kBlock + i] = blocks_[current_][kBlock - 1];
  }

  /// kBlock rows; beyond the last row, and for kNear more, the last row again.
  [[nodiscard]] const std::byte* const* current() const { return blocks_[current_]; }
  /// Precondition: has_next.
  [[nodiscard]] const std::byte* const* next() const { return blocks_[1 - current_]; }

  const bool tails;  ///< see has_tails()
  bool has_next = false;

 private:
  Rows rows_;
  size_t row_bytes_;
  size_t current_ = 0;
  const std::byte* blocks_[2][kBlock + kNear];
};

template <DType T>
constexpr size_t kElementSize = T == DType::f32 ? 4 : 2;

}  // namespace
}  // namespace keyhole::cpu
