// Inner products of a panel of keys with the heads of a group: the register tile that scoring and attention
// share. S is a level's struct of vector operations.
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

/// Inner products of rows [0, n), n <= S::kWidth, with `heads` (1..4) queries of stride `dim`:
/// out[h*out_stride + k]. All S::kWidth rows must be readable, and out is written up to the full width.
///
/// The tile holds one accumulator per (key, head), S::kWidth of them: 4 keys x 4 heads with 16 lanes. Each
/// key vector is loaded and converted once for 4 heads, each query vector once for 4 keys, and 16
/// accumulators become 16 scores in one transposed reduction.
template <class S, DType T, uint32_t heads>
[[gnu::always_inline]] inline void dot_tile(const float* queries, uint32_t dim,
                                            const std::byte* const* rows, size_t n, float* out,
                                            size_t out_stride) {
  using F = typename S::F;
  constexpr uint32_t kParts = heads == 3 ? 4 : heads;
  constexpr uint32_t kKeys = S::kWidth / kParts;      // per reduction
  constexpr uint32_t kStep = kKeys < 4 ? kKeys : 4;  // keys that share a query load

  for (size_t first = 0; first < n; first += kKeys) {
    F sums[S::kWidth];
#pragma GCC unroll 16
    for (uint32_t i = heads * kKeys; i < S::kWidth; ++i) sums[i] = S::zero();
#pragma GCC unroll 4
    for (uint32_t step = 0; step < kKeys; step += kStep) {
      const std::byte* const* row = rows + first + step;
      F acc[heads][kStep];
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::zero();
      }
#pragma GCC unroll 1
      for (uint32_t j = 0; j < dim; j += S::kWidth) {
        F key[kStep];
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) {
          key[k] = S::template load<T>(row[k] + j * kElementSize<T>);
        }
#pragma GCC unroll 4
        for (uint32_t h = 0; h < heads; ++h) {
          const F query = S::load_f32(queries + h * dim + j);
#pragma GCC unroll 4
          for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::fma(query, key[k], acc[h][k]);
        }
      }
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) sums[h * kKeys + step + k] = acc[h][k];
      }
    }
    S::template store_parts<kKeys>(S::reduce_each(sums), heads, out + first, out_stride);
  }
}

/// The same for a whole group, four heads at a time.
template <class S, DType T>
[[gnu::always_inline]] inline void dot_panel(const float* queries, uint32_t group, uint32_t dim,
                                             const std::byte* const* rows, size_t n, float* out,
                                             size_t out_stride) {
  for (; group >= 4; group -= 4, queries += 4 * dim, out += 4 * out_stride) {
    dot_tile<S, T, 4>(queries, dim, rows, n, out, out_stride);
  }
  switch (group) {
    case 3: return dot_tile<S, T, 3>(queries, dim, rows, n, out, out_stride);
    case 2: return dot_tile<S, T, 2>(queries, dim, rows, n, out, out_stride);
    case 1: return dot_tile<S, T, 1>(queries, dim, rows, n, out, out_stride);
    default: return;
  }
}

}  // namespace
}  // namespace keyhole::cpu
