// Rows of tokens that lie in several places, as a session's K and V do: sink, offloaded tokens, window and new tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/tensor_view.h"

namespace keyhole::cpu {

/// Borrowed rows of several heads in a few places, one behind the other: token i is row i of all of them together.
class RowRuns {
 public:
  static constexpr uint32_t kMostRuns = 8;
  RowRuns() = default;
  /// One run alone.
  RowRuns(const RowsView& rows) { add(rows); }  // NOLINT

  /// Adds the next tokens, which may be in i8; nothing where there are none. At most kMostRuns runs.
  void add(const RowsView& rows) {
    if (rows.tokens == 0) return;
    const size_t begin = count_ == 0 ? 0 : runs_[count_ - 1].end;
    runs_[count_++] = {begin, begin + rows.tokens, rows};
  }

  /// to[0..count) = the row's elements from `first` on, in fp32.
  void read(const Kernels& kernels, size_t token, size_t head, uint32_t first, uint32_t count,
            float* to) const {
    const Run* run = runs_.data();
    while (token >= run->end) ++run;
    const RowsView& rows = run->rows;
    const size_t row = token - run->begin;
    const std::byte* const from = rows.row(row, head) + first * dtype_size(rows.dtype);
    if (rows.dtype == DType::i8) {
      kernels.i8_to_f32(from, rows.scales.row(row, head) + first, to, count);
    } else {
      kernels.to_f32[static_cast<size_t>(rows.dtype)](from, to, count);
    }
  }

 private:
  struct Run {
    size_t begin = 0, end = 0;
    RowsView rows;
  };
  std::array<Run, kMostRuns> runs_{};
  uint32_t count_ = 0;
};

}  // namespace keyhole::cpu
