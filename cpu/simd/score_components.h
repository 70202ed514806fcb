// Kernels::score_components for every level: inner products from some components of the keys, which lie
// component by component.
//
// A register tile is 64 rows x 4 heads with 16 lanes. For each component the elements of the rows are loaded and
// converted once for 4 heads, the elements of the heads are broadcast, and the sums stay in registers until the last
// component. So only r short streams of keys and the scores touch the first-level cache. There is one accumulator per
// (row, head) and one product per component, and no reduction across lanes.
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

/// How many rows ahead components are prefetched. In blocks of 2048 rows of fp16, with 32 of 128 components read,
/// this streams as fast as one plain read does (19.3 of 19.7 GB/s on Zen 4, 64 rows: 15.5, none: 2.7, as the
/// hardware's prefetcher does not follow that many streams).
constexpr size_t kComponentsAhead = 256;

/// The rows of a tile for some of the heads.
struct ComponentTile {
  const std::byte* rows;   // the tile's rows in component 0
  const std::byte* ahead;  // those to prefetch, likewise; null: none
  size_t n;                // all rows of the tile, or, in tiles of one vector, fewer
  const float* queries;    // queries of the first of the heads
  float* out;
};

/// Sums of a tile for `heads` (1..4) heads.
template <class S, DType T, uint32_t heads, uint32_t vectors>
[[gnu::noinline]] void component_tile(const ScoreComponentsArgs& a, const ComponentTile& tile) {
  using F = typename S::F;
  constexpr size_t kVectorBytes = S::kWidth * kElementSize<T>;
  const size_t component_bytes = a.block_rows * kElementSize<T>;
  const bool whole = vectors > 1 || tile.n == S::kWidth;
  F sums[heads][vectors];
#pragma GCC unroll 4
  for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
    for (uint32_t v = 0; v < vectors; ++v) sums[h][v] = S::zero();
  }
#pragma GCC unroll 1
  for (uint32_t c = 0; c < a.component_count; ++c) {
    const size_t offset = a.components[c] * component_bytes;
    if (tile.ahead != nullptr) {
#pragma GCC unroll 4
      for (size_t line = 0; line < vectors * kVectorBytes; line += kCacheLine) {
        prefetch_far(tile.ahead + offset + line);
      }
    }
    F key[vectors];
    if (whole) {
#pragma GCC unroll 4
      for (uint32_t v = 0; v < vectors; ++v) {
        key[v] = S::template load<T>(tile.rows + offset + v * kVectorBytes);
      }
    } else {
      std::byte some[kVectorBytes] = {};
      __builtin_memcpy(some, tile.rows + offset, tile.n * kElementSize<T>);
      key[0] = S::template load<T>(some);
    }
#pragma GCC unroll 4
    for (uint32_t h = 0; h < heads; ++h) {
      const F q = S::set1(tile.queries[h * a.component_count + c]);
#pragma GCC unroll 4
      for (uint32_t v = 0; v < vectors; ++v) sums[h][v] = S::fma(q, key[v], sums[h][v]);
    }
  }
#pragma GCC unroll 4
  for (uint32_t h = 0; h < heads; ++h) {
    float* out = tile.out + h * a.score_stride;
    if (whole) {
#pragma GCC unroll 4
      for (uint32_t v = 0; v < vectors; ++v) S::store_f32(out + v * S::kWidth, sums[h][v]);
    } else {
      float some[S::kWidth];
      S::store_f32(some, sums[h][0]);
      __builtin_memcpy(out, some, tile.n * sizeof(float));
    }
  }
}

/// Rows [i, i + n) for the whole group, four heads at a time.
template <class S, DType T, uint32_t vectors>
[[gnu::always_inline]] inline void component_tiles(const ScoreComponentsArgs& a, size_t i,
                                                   size_t n) {
  const size_t row = a.first + i;
  ComponentTile tile{a.block + row * kElementSize<T>, nullptr, n, a.queries, a.scores + i};
  const size_t ahead = row + kComponentsAhead;
  if (ahead < a.block_rows) {
    tile.ahead = a.block + ahead * kElementSize<T>;
  } else if (a.next != nullptr) {
    tile.ahead = a.next + (ahead - a.block_rows) * kElementSize<T>;
  }
  uint32_t left = a.group;
  for (; left >= 4; left -= 4) {
    component_tile<S, T, 4, vectors>(a, tile);
    tile.ahead = nullptr;
    tile.queries += 4 * a.component_count;
    tile.out += 4 * a.score_stride;
  }
  switch (left) {
    case 3: return component_tile<S, T, 3, vectors>(a, tile);
    case 2: return component_tile<S, T, 2, vectors>(a, tile);
    case 1: return component_tile<S, T, 1, vectors>(a, tile);
    default: return;
  }
}

template <class S, DType T>
void score_components(const ScoreComponentsArgs& a) {
  // With 16 registers: 4 heads x 2 vectors of sums, 2 of keys, a broadcast query element.
  constexpr uint32_t kVectors = S::kWidth == 16 ? 4 : 2;
  constexpr size_t kTile = kVectors * S::kWidth;
  size_t i = 0;
  for (; i + kTile <= a.count; i += kTile) component_tiles<S, T, kVectors>(a, i, kTile);
  for (; i < a.count; i += S::kWidth) {
    component_tiles<S, T, 1>(a, i, a.count - i < S::kWidth ? a.count - i : S::kWidth);
  }
}

}  // namespace
}  // namespace keyhole::cpu
