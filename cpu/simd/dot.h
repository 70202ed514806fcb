// Inner products of a panel of keys with the heads of a group: the register tile that scoring and attention
// share. S is a level's struct of vector operations.
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

/// A panel of S::kWidth keys to score, of which the first n count.
struct Panel {
  const std::byte* const* rows;   // S::kWidth + kNearKeys readable ones, see RowBlocks::current()
  const std::byte* const* ahead;  // rows for the far prefetch, one for each key; null: none
  bool ahead_tails;               // see has_tails()
  size_t n;
  uint32_t dim;
  float* out;  // inner products, out_stride between heads; written up to the full width
  size_t out_stride;
  const uint16_t* const* scales = nullptr;  // of int8 rows, as many as rows
};

/// Inner products of a panel with `heads` (1..4) queries of stride `dim`.
///
/// The tile holds one accumulator per (key, head), S::kWidth of them: 4 keys x 4 heads with 16 lanes. Each
/// key vector is loaded and converted once for 4 heads, each query vector once for 4 keys, and 16
/// accumulators become 16 scores in one transposed reduction.
template <class S, DType T, uint32_t heads>
[[gnu::noinline]] void dot_tile(const Panel& panel, const float* queries, float* out) {
  using F = typename S::F;
  constexpr uint32_t kParts = heads == 3 ? 4 : heads;
  constexpr uint32_t kKeys = S::kWidth / kParts;     // per reduction
  constexpr uint32_t kStep = kKeys < 4 ? kKeys : 4;  // keys that share a query load

  const uint32_t dim = panel.dim;
  for (size_t first = 0; first < panel.n; first += kKeys) {
    F sums[S::kWidth];
#pragma GCC unroll 16
    for (uint32_t i = heads * kKeys; i < S::kWidth; ++i) sums[i] = S::zero();
#pragma GCC unroll 4
    for (uint32_t step = 0; step < kKeys; step += kStep) {
      const std::byte* const* row = panel.rows + first + step;
      [[maybe_unused]] const uint16_t* const* scales =
          T == DType::i8 ? panel.scales + first + step : nullptr;
      const std::byte* const* ahead = panel.ahead != nullptr ? panel.ahead + first + step : nullptr;
      if (ahead != nullptr && panel.ahead_tails) {
        for (uint32_t k = 0; k < kStep; ++k) prefetch_far(ahead[k] + dim * kElementSize<T> - 1);
      }
      F acc[heads][kStep];
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::zero();
      }
#pragma GCC unroll 1
      for (uint32_t j = 0; j < dim; j += S::kWidth) {
        // A line per key at a time: more at once would queue for the core's 16 line fill buffers and hold up
        // the arithmetic behind them (group 4: 43 ns a key in bursts of 16 lines, 36 ns so).
        const size_t offset = j * kElementSize<T>;
        if (offset % kCacheLine == 0) {
#pragma GCC unroll 4
          for (uint32_t k = 0; k < kStep; ++k) {
            prefetch_near(row[k + kNearKeys] + offset);
            if (ahead != nullptr) prefetch_far(ahead[k] + offset);
          }
        }
        F key[kStep];
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) {
          key[k] = load_elements<S, T>(row[k] + j * kElementSize<T>,
                                       T == DType::i8 ? scales[k] + j : nullptr);
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
    S::template store_parts<kKeys>(S::reduce_each(sums), heads, out + first, panel.out_stride);
  }
}

/// Inner products of a panel for a whole group, four heads at a time. Rows ahead are prefetched once.
template <class S, DType T>
[[gnu::always_inline]] inline void dot_panel(Panel panel, const float* queries, uint32_t group) {
  float* out = panel.out;
  for (; group >= 4; group -= 4, queries += 4 * panel.dim, out += 4 * panel.out_stride) {
    dot_tile<S, T, 4>(panel, queries, out);
    panel.ahead = nullptr;
  }
  switch (group) {
    case 3: return dot_tile<S, T, 3>(panel, queries, out);
    case 2: return dot_tile<S, T, 2>(panel, queries, out);
    case 1: return dot_tile<S, T, 1>(panel, queries, out);
    default: return;
  }
}

}  // namespace
}  // namespace keyhole::cpu
