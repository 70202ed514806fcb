// Kernels of a prefill between its products, for all tokens side by side. All enqueue. Rows are dense, widths
// multiples of 4, head dimensions even.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "tools/llama/cuda/kv_numbers.h"
#include "tools/llama/cuda/split.h"

namespace keyhole::tools::cuda {

/// hidden `[n, width]` = scale * rows of the table `[vocab, width]`.
void embed_tokens(const uint32_t* tokens, uint32_t n, const Split& table, uint32_t width,
                  float scale, float* hidden, cudaStream_t stream);

/// Writes (cos, sin) of position * frequency, times `factor`, `[n, pairs]`, for positions first..first+n-1; the angle
/// is computed in double.
void rope_table(const double* frequencies, uint32_t pairs, double factor, uint32_t first,
                uint32_t n, float2* table, cudaStream_t stream);

/// out `[n, width]` = x / sqrt(mean(x^2) + eps) * weight.
void normalise_tokens(const float* x, const float* weight, float eps, uint32_t n, uint32_t width,
                      const SplitOut& out, cudaStream_t stream);

/// The input and output of finish_heads(): the queries, keys and values of n tokens.
struct Heads {
  const float* qkv = nullptr;     ///< `[n, (q_heads + 2 kv_heads) * d]`
  const float2* table = nullptr;  ///< of rope_table(), from the first token's row on
  uint32_t n = 0;
  uint32_t q_heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t pairs =
      0;  ///< components i and i + pairs of a head are turned together; from 2 * pairs on they stay
  // Bias and norms; null: none.
  const float* bias = nullptr;    ///< `[(q_heads + 2 kv_heads) * d]`
  const float* q_norm = nullptr;  ///< `[d]`: weights of a norm of each head of q
  const float* k_norm = nullptr;
  float eps = 0.0F;  ///< of these norms
  // For attention; null: not wanted:
  KvNumbers attended =
      KvNumbers::f16;  ///< f32, or f16 (numbers beyond its range become its largest)
  void* q = nullptr;   ///< `[n, q_heads, d]`
  void* k = nullptr;   ///< `[n, kv_heads, d]`
  void* v = nullptr;
  // Outputs for the KV cache; null: not wanted. k and v are rounded to `numbers` as the library rounds them (numbers
  // too large for fp16 become infinite, and are refused there). q, which only guides indexes, is f32, or, where k and
  // v have 16 bits, f16 as above.
  KvNumbers numbers = KvNumbers::f32;
  void* q_out = nullptr;
  void* k_out = nullptr;
  void* v_out = nullptr;
};
/// Adds the bias, normalises heads, turns q and k by RoPE (rotate-half) and hands all three out.
void finish_heads(const Heads& heads, cudaStream_t stream);

/// out `[count]` = x; count a multiple of 4.
void split_numbers(const float* x, size_t count, const SplitOut& out, cudaStream_t stream);

/// Number of bins in which |x - truth| / |truth| of each of `rows` rows `[dim]` is counted, see error_of_bin(). dim a
/// multiple of 4.
inline constexpr uint32_t kErrorBins = 256;
void count_errors(const float* x, const float* truth, size_t rows, uint32_t dim, uint32_t* bins,
                  cudaStream_t stream);
/// The upper end of a bin: 8 bins an octave, from 2^-24 on.
[[nodiscard]] double error_of_bin(uint32_t bin);

/// The operands of out `[n, inner]` = activation(gate) * up, with gate_up `[n, 2 inner]` plus bias.
struct GateUp {
  const float* gate_up = nullptr;
  const float* bias = nullptr;  ///< `[2 inner]`; null: none
  uint32_t n = 0, inner = 0;
  bool gelu = false;                       ///< GELU by tanh; else SiLU
  const __nv_bfloat16* rounded = nullptr;  ///< gate_up, where it has been rounded
};
void activate_tokens(const GateUp& from, const SplitOut& out, cudaStream_t stream);

}  // namespace keyhole::tools::cuda
