// Checked access to the caller's tensors: shapes, dtypes, finiteness, conversion row by row.
#pragma once

#include "cpu/kernels.h"
#include "keyhole/keyhole.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// A validated tensor `[tokens, heads, dim]` whose rows are contiguous.
struct RowsIn {
  const std::byte* data = nullptr;
  size_t token_stride = 0;  ///< bytes
  size_t head_stride = 0;   ///< bytes
  uint32_t tokens = 0;
  uint32_t heads = 0;
  uint32_t dim = 0;
  DType dtype = DType::f32;
  bool on_device = false;  ///< `data` is a device pointer
  // Of rows that are some of a tensor's, evenly spread: row t is token first + t * step.
  uint32_t first = 0;
  uint32_t step = 1;

  [[nodiscard]] uint32_t token_of(uint32_t row) const { return first + row * step; }
  [[nodiscard]] const std::byte* row(size_t token, size_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

/// Checks that `t` is `[n, heads, dim]` (n <= max_tokens, 1 where `one_token` is set), or `[heads, dim]`, which is one token; in
/// device memory only where `device` is set. Throws Error(invalid_argument | unsupported) with `name`.
[[nodiscard]] RowsIn check_rows(const keyhole_tensor* t, const char* name, uint32_t heads,
                                uint32_t dim, bool one_token, bool device = false);

/// The values of the tokens whose keys are `k`: the tensor, as check_rows() takes it, or the first value_dim components of the
/// keys where the model has them there (then the tensor must be NULL).
[[nodiscard]] RowsIn check_values(const keyhole_tensor* v, const ModelShape& model, uint32_t layer,
                                  const RowsIn& k, bool one_token, bool device = false);

/// The same for a tensor that will be written.
struct RowsOut {
  std::byte* data = nullptr;
  size_t head_stride = 0;  ///< bytes
  DType dtype = DType::f32;
  bool on_device = false;
  size_t token_stride = 0;  ///< bytes

  [[nodiscard]] std::byte* row(size_t token, size_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};
[[nodiscard]] RowsOut check_out(const keyhole_tensor* t, const char* name, uint32_t heads,
                                uint32_t dim, bool device = false);

/// The same for `[tokens, heads, dim]`.
[[nodiscard]] RowsOut check_many_out(const keyhole_tensor* t, const char* name, uint32_t tokens,
                                     uint32_t heads, uint32_t dim, bool device = false);

/// Tokens [begin, begin + n) of `rows`.
[[nodiscard]] RowsIn slice(const RowsIn& rows, uint32_t begin, uint32_t n);

/// `[n, dim]` host tensor.
[[nodiscard]] RowsView check_matrix(const keyhole_tensor* t, const char* name, uint32_t dim);

/// Converts one row between dtypes; `scratch` holds kMaxHeadDim floats (used if neither side is f32).
void convert_row(const cpu::Kernels& kernels, const std::byte* src, DType from, std::byte* dst,
                 DType to, uint32_t dim, float* scratch);

/// A row of a tensor as the library keeps it: `dim` elements of dtype `to`, those that the tensor lacks are 0. scratch: as above.
void store_row(const cpu::Kernels& kernels, const RowsIn& rows, size_t token, size_t head,
               std::byte* dst, DType to, uint32_t dim, float* scratch);

/// Throws Error(not_finite) that names the first row of tokens [begin, end) whose elements are not all
/// finite after conversion to `to`.
void check_finite(const cpu::Kernels& kernels, const RowsIn& rows, const char* name, uint32_t begin,
                  uint32_t end, DType to);

/// Throws Error(not_finite) where one of `n` elements of an attention is not finite: q, K and V were, so products or sums of them
/// are beyond fp32.
void check_answer(const cpu::Kernels& kernels, const std::byte* o, DType dtype, size_t n);

}  // namespace keyhole::runtime
