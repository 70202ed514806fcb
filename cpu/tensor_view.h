// The one view of rows that every part hands on, from the C boundary to the kernels: borrowed memory, whose strides
// are counted in elements. Behind it what is made of views: rows with the scales of int8, keys and values together,
// and tokens that lie in a few pieces.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/types.h"

namespace keyhole {

/// Where the memory of a tensor lies. Values equal the public keyhole_memory (checked in runtime/).
enum class Memory : int32_t {
  host = 0,
  pinned = 1,  ///< host memory that the device can read as it lies (gpu/pinned_memory.h)
  device = 2
};

/// Borrowed rows `[tokens, heads, dim]` of `dtype`. The `dim` elements of a row lie side by side; rows may lie at any
/// address. Owns nothing. `Byte` is const std::byte in a TensorView, and std::byte in a TensorOut, whose rows are
/// written. Kernels of a device take it by value.
template <class Byte>
struct BasicTensorView {
  Byte* data = nullptr;        ///< row (0, 0); null: no rows
  ptrdiff_t token_stride = 0;  ///< elements from a token to the next; it may be negative, or 0
  ptrdiff_t head_stride = 0;   ///< elements from a head to the next; it may be negative, or 0
  size_t tokens = 0;
  uint32_t heads = 1;
  uint32_t dim = 0;
  DType dtype = DType::f32;
  Memory memory = Memory::host;

  [[nodiscard]] bool on_device() const { return memory == Memory::device; }
  [[nodiscard]] size_t row_bytes() const { return dim * dtype_size(dtype); }
  /// The address of a row. It is computed modulo 2^64, as a device does.
  [[nodiscard]] Byte* row(size_t token, size_t head = 0) const {
    const size_t elements =
        token * static_cast<size_t>(token_stride) + head * static_cast<size_t>(head_stride);
    return data + static_cast<ptrdiff_t>(elements * dtype_size(dtype));
  }
  /// Tokens [begin, begin + n).
  [[nodiscard]] BasicTensorView slice(size_t begin, size_t n) const {
    BasicTensorView part = *this;
    part.data = row(begin);
    part.tokens = n;
    return part;
  }
  /// Heads [first, first + n).
  [[nodiscard]] BasicTensorView some_heads(uint32_t first, uint32_t n) const {
    BasicTensorView part = *this;
    part.data = row(0, first);
    part.heads = n;
    return part;
  }

  /// One head alone.
  [[nodiscard]] BasicTensorView head(uint32_t number) const { return some_heads(number, 1); }

  /// What may be written may be read.
  template <class Read>
  requires(std::is_same_v<Read, const Byte> && !std::is_const_v<Byte>)
  operator BasicTensorView<Read>() const {  // NOLINT: a view may be read wherever one is asked for
    return {data, token_stride, head_stride, tokens, heads, dim, dtype, memory};
  }
};
using TensorView = BasicTensorView<const std::byte>;
using TensorOut = BasicTensorView<std::byte>;

/// The view of `[tokens, heads, dim]` that lies without gaps.
template <class Byte>
[[nodiscard]] BasicTensorView<Byte> dense_tensor(Byte* data, size_t tokens, uint32_t heads,
                                                 uint32_t dim, DType dtype,
                                                 Memory memory = Memory::host) {
  return {data, ptrdiff_t{dim} * heads, ptrdiff_t{dim}, tokens, heads, dim, dtype, memory};
}

/// Number of int8 rows that share their scales: as many as a block of codes has (cpu/code_layout.h).
inline constexpr uint32_t kScaleRows = 256;

/// The scales of int8 rows, one bf16 for each head, channel and block of kScaleRows rows: element j of row i of head h
/// stands for int8 * data[(first + i) / kScaleRows * stride + h * head_stride + j]. The product is exact in fp32 (7
/// bits by 8).
struct RowScales {
  const uint16_t* data =
      nullptr;                ///< scales of the first row's block and head; null: rows are not int8
  size_t stride = 0;          ///< elements between blocks
  size_t first = 0;           ///< place of row 0 in its block, < kScaleRows
  ptrdiff_t head_stride = 0;  ///< elements between heads

  [[nodiscard]] const uint16_t* row(size_t i, size_t head = 0) const {
    return data + (first + i) / kScaleRows * stride + static_cast<ptrdiff_t>(head) * head_stride;
  }
  [[nodiscard]] RowScales slice(size_t begin) const {
    if (data == nullptr) return {};
    return {row(begin), stride, (first + begin) % kScaleRows, head_stride};
  }
  [[nodiscard]] RowScales from_head(size_t head) const {
    if (data == nullptr) return {};
    return {row(0, head), stride, first, head_stride};
  }
};

/// Rows that may be int8: those then stand for int8 times scale. cpu/row_access.h reads rows of any dtype. Most often
/// the rows of one KV head.
struct RowsView : TensorView {
  RowScales scales{};  ///< of rows of i8

  [[nodiscard]] RowsView slice(size_t begin, size_t n) const {
    return {TensorView::slice(begin, n), scales.slice(begin)};
  }
  [[nodiscard]] RowsView head(uint32_t number) const {
    return {TensorView::head(number), scales.from_head(number)};
  }
};

/// The view of `[n, dim]`, rows of one head that lie without gaps.
[[nodiscard]] inline RowsView dense_rows(const void* data, size_t n, uint32_t dim, DType dtype) {
  return {dense_tensor(static_cast<const std::byte*>(data), n, 1, dim, dtype)};
}

/// Keys and values of the same tokens and heads, of one dim and dtype.
struct KvView {
  RowsView keys;
  RowsView values;

  [[nodiscard]] KvView slice(size_t begin, size_t n) const {
    return {keys.slice(begin, n), values.slice(begin, n)};
  }
  [[nodiscard]] KvView head(uint32_t number) const {
    return {keys.head(number), values.head(number)};
  }
};

/// Keys and values of tokens that lie in a few pieces, one behind the other: a sink, and the two parts of a ring.
struct KvPieces {
  std::array<KvView, 3> pieces;
  uint32_t count = 0;

  [[nodiscard]] KvPieces head(uint32_t number) const {
    KvPieces one{{}, count};
    for (uint32_t i = 0; i < count; ++i) one.pieces[i] = pieces[i].head(number);
    return one;
  }
};

}  // namespace keyhole
