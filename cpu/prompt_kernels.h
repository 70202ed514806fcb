// Arguments of the kernels for many queries: products of fp32 matrices, and the softmax between two of them. The
// library uses no BLAS: tiles of 128 queries by 64 rows fit the first two levels of cache, where a register-blocked
// loop comes within 10 % of one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::cpu {

/// Rows per block of K and V; queries attend or skip a block as a whole.
inline constexpr uint32_t kPromptRows = 64;

/// C = A B, or C += A B, row-major; strides are elements between rows. Each element of C is summed in the order of k.
struct ProductArgs {
  const float* a;  ///< `[m, k]`
  size_t a_stride;
  const float* b;  ///< `[k, n]`
  size_t b_stride;
  float* c;  ///< out `[m, n]`; where it adds, in as well
  size_t c_stride;
  uint32_t m, k;
  uint32_t n;  ///< a multiple of 16
  bool adds;
};

/// The product that writes the inner products of m queries `[m, width]` with kPromptRows keys, transposed `[width,
/// kPromptRows]`, to x `[m, kPromptRows]`.
[[nodiscard]] inline ProductArgs scores_of_rows(const float* queries, uint32_t m, uint32_t width,
                                                const float* keys, float* x) {
  return {.a = queries,
          .a_stride = width,
          .b = keys,
          .b_stride = kPromptRows,
          .c = x,
          .c_stride = kPromptRows,
          .m = m,
          .k = width,
          .n = kPromptRows,
          .adds = false};
}

/// Turns logits of kPromptRows rows for one query into softmax weights, in place, relative to the largest logit so
/// far.
struct WeighRowArgs {
  float* x;           ///< `[kPromptRows]` inner products times the scale
  uint32_t from, to;  ///< rows that the query sees, to <= kPromptRows; others get 0
  float softcap;      ///< as LogitParams::softcap
  float* largest;     ///< in and out: the largest logit so far; -inf before the first
  float* sum;         ///< in and out: the sum of the weights so far
  /// In and out: the weighted sum of values so far `[dim]`, dim a multiple of 16, rescaled to the new largest logit.
  float* o;
  uint32_t dim;
};

}  // namespace keyhole::cpu
