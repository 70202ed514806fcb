// The decoder's own loops over arrays: all arithmetic of a model that is not a large matrix product.
//
// Each function is compiled for AVX-512, AVX2 and the baseline, and the machine's best is chosen when the
// program is loaded. Results may differ in the last bits between the three.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::tools {

/// Numbers of 16 bits as they lie in memory. bf16 is the upper half of an fp32 number.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

/// out[i] = fp32(x[i]), `[n]`; exact.
void to_f32(const BFloat16* x, size_t n, float* out);
void to_f32(const Float16* x, size_t n, float* out);
/// The same conversion for processors without an instruction for it (F16C).
void to_f32_by_integers(const Float16* x, size_t n, float* out);

/// out = x / sqrt(mean(x^2) + eps) * weight, all `[n]`; out may be x.
void rms_norm(const float* x, const float* weight, size_t n, float eps, float* out);

/// Computes y[i] = W[i] . x for rows [first, last) of W, row-major with `cols` columns.
void matrix_vector(const float* matrix, size_t cols, const float* x, size_t first, size_t last,
                   float* y);
/// matrix_vector() for matrices of 16 bits a number: half the memory traffic, which limits this product.
void matrix_vector(const BFloat16* matrix, size_t cols, const float* x, size_t first, size_t last,
                   float* y);
void matrix_vector(const Float16* matrix, size_t cols, const float* x, size_t first, size_t last,
                   float* y);

/// Computes y += sum of factors[i] * row i of W, for `rows` rows of `cols` columns; y `[cols]`.
void add_rows(const float* matrix, size_t cols, const float* factors, size_t rows, float* y);
void add_rows(const BFloat16* matrix, size_t cols, const float* factors, size_t rows, float* y);
void add_rows(const Float16* matrix, size_t cols, const float* factors, size_t rows, float* y);

/// out = silu(gate) * up, all `[n]`; out may be gate. silu(x) = x / (1 + exp(-x)).
void silu_multiply(const float* gate, const float* up, size_t n, float* out);
/// out = gelu(gate) * up, all `[n]`; out may be gate. gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))):
/// the approximation by tanh.
void gelu_multiply(const float* gate, const float* up, size_t n, float* out);

/// x = cap * tanh(x / cap), `[n]`, in place; cap > 0. Absolute error below 4e-7 * cap.
void soft_cap(float cap, size_t n, float* x);

/// y += x, both `[n]`.
void add(const float* x, size_t n, float* y);

/// One row of an online softmax over logits in base 2 (already times scale * log2 e):
/// replaces scores[i] by 2^(scores[i] - m) for i < valid, with m = max(running_max, largest score), and by
/// 0 for valid <= i < n. Updates running_max to m and running_sum to running_sum * shrink + their sum,
/// and returns shrink = 2^(former running_max - m), by which the row's output so far must be multiplied.
/// Start with running_max = -inf, running_sum = 0. 1 <= valid <= n.
[[nodiscard]] float online_softmax_row(float* scores, size_t valid, size_t n, float& running_max,
                                       float& running_sum);

/// y *= factor, `[n]`.
void scale(float factor, size_t n, float* y);

/// Replaces each x of `[n]` by exp(x), as the functions above compute it. Relative error below 3e-7 + 1e-7 * |x| over
/// [-87, 87]; outside, the value at the nearer end.
void exp_in_place(float* x, size_t n);

}  // namespace keyhole::tools
