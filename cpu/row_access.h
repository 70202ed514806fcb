// Reads rows of a view of any dtype, int8 with scales included: as fp32, in another dtype, or as inner products with
// queries.
#pragma once

#include <cstring>
#include <span>

#include "cpu/kernels.h"

namespace keyhole::cpu {

/// dst[0..dim) = row i in fp32.
inline void read_row(const Kernels& kernels, const RowsView& rows, size_t i, float* dst) {
  if (rows.dtype == DType::i8) {
    kernels.i8_to_f32(rows.row(i), rows.scales.row(i), dst, rows.dim);
  } else {
    kernels.to_f32[static_cast<size_t>(rows.dtype)](rows.row(i), dst, rows.dim);
  }
}

/// Writes row i in `dtype` (not i8), rounded to nearest even where `dtype` is not the rows' own.
inline void copy_row(const Kernels& kernels, const RowsView& rows, size_t i, DType dtype,
                     std::byte* dst) {
  if (rows.dtype == dtype) {
    std::memcpy(dst, rows.row(i), rows.row_bytes());
    return;
  }
  float row[kMaxHeadDim];
  read_row(kernels, rows, i, row);
  kernels.from_f32[static_cast<size_t>(dtype)](row, dst, rows.dim);
}

/// scores[h*score_stride + i] = queries[h] . row ids[i], for queries `[group, dim]` and rows of one head. Where ids is
/// null the rows are [0, count).
inline void score_rows(const Kernels& kernels, const RowsView& rows, const float* queries,
                       uint32_t group, const uint32_t* ids, size_t count, float* scores,
                       size_t score_stride) {
  kernels.score[static_cast<size_t>(rows.dtype)]({.queries = queries,
                                                  .group = group,
                                                  .keys = rows,
                                                  .ids = ids,
                                                  .count = count,
                                                  .scores = scores,
                                                  .score_stride = score_stride});
}

}  // namespace keyhole::cpu
