// A second copy of the keys that lies component by component: reading r of d components of all keys streams
// r/d of the copy, where the keys themselves would be read whole.
//
// LAYOUT. Blocks of kRows rows, each `[dim, kRows]` elements: the keys' own, or int8 codes (key_codes.h). The
// last block is as large as the others, so that rows come and go without moving any that stays. Blocks lie in
// chunks of reserved memory, each as large as all before it, which never move either.
#pragma once

#include <vector>

#include "cpu/memory.h"
#include "index/base.h"
#include "index/scan/key_codes.h"

namespace keyhole::index {

class ComponentBlocks {
 public:
  /// Rows of a block: long enough that each component is a stream of its own (in blocks of 256 rows a scan takes a
  /// quarter longer), short enough that the unused end of the last block is little.
  static constexpr size_t kRows = 2048;

  /// An empty copy for keys `[*, dim]` of `dtype`, which are copied as int8 codes where `coded`.
  ComponentBlocks(const cpu::Kernels& kernels, uint32_t dim, DType dtype, bool coded);

  ComponentBlocks(const ComponentBlocks& o);
  ComponentBlocks(ComponentBlocks&&) = default;
  ComponentBlocks& operator=(ComponentBlocks&&) = default;

  /// Rows that have been copied and not yet taken in.
  struct Growth {
    size_t first = 0, count = 0;  ///< rows [first, count)
    std::vector<std::byte>
        blocks;  ///< from the block of row `first` on; empty where all are in `chunk`
    cpu::ReservedBuffer chunk;  ///< a further chunk, or empty
    KeyCodes codes;             ///< of the first rows
  };
  /// Copies rows [count(), keys.tokens), at least one. Changes nothing, and may run while others score. Codes get
  /// their centre and scales from the first rows that come to an empty copy.
  [[nodiscard]] Growth grow(const RowsView& keys, cpu::Pool* pool, const Progress& progress) const;
  void take(Growth& growth) noexcept;
  void truncate(size_t count) { count_ = std::min(count_, count); }

  [[nodiscard]] size_t count() const { return count_; }
  [[nodiscard]] size_t element_bytes() const { return dtype_size(element_); }
  [[nodiscard]] size_t bytes() const { return bytes_of(count_, dim_, element_); }
  [[nodiscard]] static size_t estimate(size_t count, uint32_t dim, DType dtype, bool coded) {
    return bytes_of(count, dim, coded ? DType::i8 : dtype);
  }

  /// The chosen components of a group's queries, in the form in which blocks are scored.
  struct Queries {
    uint32_t group = 0;
    uint32_t chosen = 0;  ///< components
    uint32_t components[kMaxHeadDim];
    std::vector<float> elements;  ///< `[group, chosen]`, at least
    float shift[kMaxGroup];       ///< `[group]` what a score lacks: codes are those of centred keys
  };
  /// Fills `elements` and `shift` for the group and the components that `out` holds; queries `[group, dim]`. Allocates
  /// only where `elements` is too small.
  void encode_queries(const float* queries, Queries& out) const;

  /// Inner products over the chosen components alone, less `shift`, for rows [first, first + n), all of one block:
  /// scores[h * stride + i]. Prefetches the rows that follow.
  void score(const Queries& queries, size_t first, size_t n, float* scores, size_t stride) const;

  /// Saves centre and scales of codes; load() makes the copy again from the keys. load() is for an empty copy, reads
  /// all that is left of the stream, and takes nothing in before in.finish().
  void save(Writer& out) const;
  void load(Reader& in, const RowsView& keys, cpu::Pool* pool);

 private:
  struct Chunk {
    cpu::ReservedBuffer memory;
    size_t first_block;
    size_t blocks;
  };
  [[nodiscard]] static size_t blocks_of(size_t rows) { return (rows + kRows - 1) / kRows; }
  [[nodiscard]] static size_t bytes_of(size_t count, uint32_t dim, DType element) {
    return blocks_of(count) * kRows * dim * dtype_size(element) +
           (element == DType::i8 && count > 0 ? 2 * dim * sizeof(float) : 0);
  }
  [[nodiscard]] bool coded() const { return element_ == DType::i8; }
  [[nodiscard]] size_t block_bytes() const { return kRows * dim_ * element_bytes(); }
  [[nodiscard]] size_t reserved_blocks() const {
    return chunks_.empty() ? 0 : chunks_.back().first_block + chunks_.back().blocks;
  }
  [[nodiscard]] std::byte* block(size_t b) const;
  /// Makes the growth of an empty copy, in memory of its own.
  [[nodiscard]] Growth first_rows(KeyCodes codes, const RowsView& keys, cpu::Pool* pool,
                                  const Progress& progress) const;
  /// Copies rows that are not coded to where the first of them lies in its block.
  void transpose_rows(const std::byte* rows, ptrdiff_t stride, size_t n, std::byte* out) const;
  /// Copies rows [first, end), all of one block, to their places in the block at `out`.
  void copy_rows(const KeyCodes& codes, const RowsView& keys, size_t first, size_t end,
                 std::byte* out) const;
  /// copy_rows() for rows of any blocks, which lie one after the other at `out`, beginning with that of row `first`.
  void copy_blocks(const KeyCodes& codes, const RowsView& keys, size_t first, size_t end,
                   std::byte* out, cpu::Pool* pool, const Progress& progress) const;

  const cpu::Kernels* kernels_;
  uint32_t dim_;
  DType element_;
  size_t count_ = 0;
  KeyCodes codes_;  ///< centre and scales, where elements are codes
  std::vector<Chunk> chunks_;
};

}  // namespace keyhole::index
