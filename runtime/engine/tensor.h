// Checked access to the caller's tensors: views of them, whose shapes and dtypes were checked; finiteness; conversion
// row by row.
#pragma once

#include "cpu/kernels.h"
#include "cpu/tensor_view.h"
#include "keyhole/keyhole.h"
#include "runtime/plan/config.h"

namespace keyhole::runtime {

/// Checks that `t` is `[n, heads, dim]` (n <= max_tokens, 1 where `one_token` is set), or `[heads, dim]`, which is one
/// token; in device memory only where `device` is set. Throws Error(invalid_argument | unsupported) with `name`.
[[nodiscard]] TensorView check_rows(const keyhole_tensor* t, const char* name, uint32_t heads,
                                    uint32_t dim, bool one_token, bool device = false);

/// The values of the tokens whose keys are `k`: the tensor, as check_rows() takes it, or the first value_dim components
/// of the keys where the model has them there (then the tensor must be NULL).
[[nodiscard]] TensorView check_values(const keyhole_tensor* v, const ModelShape& model,
                                      uint32_t layer, const TensorView& k, bool one_token,
                                      bool device = false);

/// Checks that `t`, which will be written, is `[heads, dim]` or `[1, heads, dim]`, and that its rows do not overlap.
[[nodiscard]] TensorOut check_out(const keyhole_tensor* t, const char* name, uint32_t heads,
                                  uint32_t dim, bool device = false);

/// Checks that `t`, which will be written, is `[tokens, heads, dim]`, and that its rows do not overlap.
[[nodiscard]] TensorOut check_many_out(const keyhole_tensor* t, const char* name, uint32_t tokens,
                                       uint32_t heads, uint32_t dim, bool device = false);

/// `[n, dim]` host tensor.
[[nodiscard]] TensorView check_matrix(const keyhole_tensor* t, const char* name, uint32_t dim);

/// Converts one row between dtypes; `scratch` holds kMaxHeadDim floats (used if neither side is f32).
void convert_row(const cpu::Kernels& kernels, const std::byte* src, DType from, std::byte* dst,
                 DType to, uint32_t dim, float* scratch);

/// A row of a tensor as the library keeps it: `dim` elements of dtype `to`, those that the tensor lacks are 0. scratch:
/// as above.
void store_row(const cpu::Kernels& kernels, const TensorView& rows, size_t token, size_t head,
               std::byte* dst, DType to, uint32_t dim, float* scratch);

/// Which tokens of a tensor a view has, where it has some of them, evenly spread: token t is first + t * step of the
/// tensor's.
struct TokenSample {
  uint32_t first = 0;
  uint32_t step = 1;

  [[nodiscard]] uint32_t token(uint32_t t) const { return first + t * step; }
};

/// Throws Error(not_finite) that names the first row of tokens [begin, end) whose elements are not all
/// finite after conversion to `to`. `sample`: which of the caller's tokens `rows` has.
void check_finite(const cpu::Kernels& kernels, const TensorView& rows, const char* name,
                  uint32_t begin, uint32_t end, DType to, const TokenSample& sample = {});

/// Throws Error(not_finite) where one of `n` elements of an attention is not finite: q, K and V were, so products or
/// sums of them are beyond fp32.
void check_answer(const cpu::Kernels& kernels, const std::byte* o, DType dtype, size_t n);

}  // namespace keyhole::runtime
