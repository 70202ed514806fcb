// Rows of many tokens and heads in one place, and sequences of rows that lie in several places, as a session's K and
// V do: sink, offloaded tokens, window and new tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu/kernels.h"

namespace keyhole::cpu {

/// Borrowed rows `[tokens, heads, head_dim]` in f32, f16 or bf16. Elements of a row are contiguous; strides are in
/// bytes.
struct TokenRows {
  std::byte* data = nullptr;
  size_t token_stride = 0, head_stride = 0;
  DType dtype = DType::f32;

  [[nodiscard]] std::byte* row(size_t token, size_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

/// Scales of rows in i8: those of head 0, and the distance in elements to the next head's.
struct HeadScales {
  RowScales rows{};
  size_t head_stride = 0;
};

/// Borrowed rows in a few places, one behind the other: token i is row i of all of them together.
class RowRuns {
 public:
  static constexpr uint32_t kMostRuns = 8;
  RowRuns() = default;
  /// One run alone, without end.
  RowRuns(const TokenRows& rows) { add(std::numeric_limits<size_t>::max(), rows); }  // NOLINT

  /// Adds the next `count` tokens, rows 0 to count - 1 of `rows`, which may be in i8; nothing where count is 0. At
  /// most kMostRuns runs.
  void add(size_t count, const TokenRows& rows, const HeadScales& scales = {}) {
    if (count == 0) return;
    const size_t begin = count_ == 0 ? 0 : runs_[count_ - 1].end;
    runs_[count_++] = {begin, begin + count, rows, scales};
  }

  /// to[0..count) = the row's elements from `first` on, in fp32.
  void read(const Kernels& kernels, size_t token, size_t head, uint32_t first, uint32_t count,
            float* to) const {
    const Run* run = runs_.data();
    while (token >= run->end) ++run;
    const TokenRows& rows = run->rows;
    const size_t row = token - run->begin;
    const std::byte* const from = rows.row(row, head) + first * dtype_size(rows.dtype);
    if (rows.dtype == DType::i8) {
      const HeadScales& s = run->scales;
      kernels.i8_to_f32(from, s.rows.row(row) + head * s.head_stride + first, to, count);
    } else {
      kernels.to_f32[static_cast<size_t>(rows.dtype)](from, to, count);
    }
  }

 private:
  struct Run {
    size_t begin = 0, end = 0;
    TokenRows rows;
    HeadScales scales;
  };
  std::array<Run, kMostRuns> runs_{};
  uint32_t count_ = 0;
};

}  // namespace keyhole::cpu
