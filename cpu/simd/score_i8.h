// Kernels::score_i8 for every level. S is a level's struct of integer operations:
//   kWidth      int32 lanes of an accumulator
//   kChunk      key elements that one step multiplies
//   Query       element type of a prepared query; prepared queries are padded with zeros to kChunk
//   load_key    kChunk elements, or the first n of them and zeros
//   multiply    acc + products of kChunk elements
//   correction  what multiply() adds too much in a whole row, from the sum of the query's elements
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

constexpr uint32_t round_up_to(uint32_t n, uint32_t unit) { return (n + unit - 1) / unit * unit; }

template <class S>
struct PreparedQueries {
  alignas(64) typename S::Query elements[kMaxGroup * kMaxHeadDim];
  int32_t correction[kMaxGroup];
  uint32_t padded_dim;

  explicit PreparedQueries(const ScoreI8Args& a) : padded_dim(round_up_to(a.dim, S::kChunk)) {
    for (uint32_t h = 0; h < a.group; ++h) {
      int32_t sum = 0;
      for (uint32_t j = 0; j < padded_dim; ++j) {
        const int8_t q = j < a.dim ? a.queries[h * a.dim + j] : int8_t{0};
        elements[h * padded_dim + j] = q;
        sum += q;
      }
      correction[h] = S::correction(sum);
    }
  }
};

/// Scores of rows [0, n) for `heads` (1..4) heads from `head` on; the tile of dot.h in integers.
template <class S, uint32_t heads>
[[gnu::always_inline]] inline void dot_tile_i8(const ScoreI8Args& a, const PreparedQueries<S>& queries,
                                               uint32_t head, const std::byte* const* rows,
                                               const float* key_scales, size_t n, float* out,
                                               size_t out_stride) {
  using I = typename S::I;
  using F = typename S::F;
  constexpr uint32_t kParts = heads == 3 ? 4 : heads;
  constexpr uint32_t kKeys = S::kWidth / kParts;
  constexpr uint32_t kStep = kKeys < 4 ? kKeys : 4;

  float lane_scale[S::kWidth];
  int32_t lane_correction[S::kWidth];
  for (uint32_t i = 0; i < S::kWidth; ++i) {
    const uint32_t h = i / kKeys < heads ? head + i / kKeys : head;
    lane_scale[i] = a.query_scales[h];
    lane_correction[i] = queries.correction[h];
  }
  const F scale = S::load_f32(lane_scale);
  const I correction = S::load_i32(lane_correction);
  const typename S::Query* q = queries.elements + head * queries.padded_dim;

  for (size_t first = 0; first < n; first += kKeys) {
    I sums[S::kWidth];
#pragma GCC unroll 16
    for (uint32_t i = heads * kKeys; i < S::kWidth; ++i) sums[i] = S::zero_i32();
#pragma GCC unroll 4
    for (uint32_t step = 0; step < kKeys; step += kStep) {
      const std::byte* const* row = rows + first + step;
      I acc[heads][kStep];
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::zero_i32();
      }
#pragma GCC unroll 1
      for (uint32_t j = 0; j < a.dim; j += S::kChunk) {
        typename S::Key key[kStep];
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) key[k] = S::load_key(row[k] + j, a.dim - j);
#pragma GCC unroll 4
        for (uint32_t h = 0; h < heads; ++h) {
          const typename S::Key query = S::load_query(q + h * queries.padded_dim + j);
#pragma GCC unroll 4
          for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::multiply(acc[h][k], key[k], query);
        }
      }
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) sums[h * kKeys + step + k] = acc[h][k];
      }
    }
    // Exact integers below 2^24, then two products from left to right: the same bits at every level.
    const F dots = S::to_f32(S::sub_i32(S::reduce_each_i32(sums), correction));
    const F scaled = S::mul(S::mul(dots, scale), S::template repeat<kKeys>(key_scales + first));
    S::template store_parts<kKeys>(scaled, heads, out + first, out_stride);
  }
}

template <class S>
[[gnu::always_inline]] inline void dot_panel_i8(const ScoreI8Args& a,
                                                const PreparedQueries<S>& queries,
                                                const std::byte* const* rows,
                                                const float* key_scales, size_t n, float* out,
                                                size_t out_stride) {
  uint32_t h = 0;
  for (; a.group - h >= 4; h += 4) {
    dot_tile_i8<S, 4>(a, queries, h, rows, key_scales, n, out + h * out_stride, out_stride);
  }
  out += h * out_stride;
  switch (a.group - h) {
    case 3: return dot_tile_i8<S, 3>(a, queries, h, rows, key_scales, n, out, out_stride);
    case 2: return dot_tile_i8<S, 2>(a, queries, h, rows, key_scales, n, out, out_stride);
    case 1: return dot_tile_i8<S, 1>(a, queries, h, rows, key_scales, n, out, out_stride);
    default: return;
  }
}

template <class S>
void score_i8(const ScoreI8Args& a) {
  constexpr size_t kPanel = S::kWidth;
  const Rows keys{reinterpret_cast<const std::byte*>(a.keys), a.key_stride, a.ids, a.count};
  const PreparedQueries<S> queries(a);
  const auto prefetch = [&](size_t i) {
    prefetch_row(keys.at(i), a.dim);
    if (a.key_scales != nullptr) __builtin_prefetch(a.key_scales + keys.id(i), 0, 3);
  };
  // Contiguous rows are left to the hardware's prefetcher.
  const size_t ahead = 4096 / a.dim;
  const size_t prefetched = a.ids != nullptr ? a.count : 0;
  for (size_t i = 0; i < ahead && i < prefetched; ++i) prefetch(i);

  for (size_t begin = 0; begin < a.count; begin += kPanel) {
    for (size_t i = begin + ahead; i < begin + ahead + kPanel && i < prefetched; ++i) prefetch(i);
    const std::byte* rows[kPanel];
    keys.panel(begin, rows);
    const size_t n = a.count - begin < kPanel ? a.count - begin : kPanel;
    float key_scales[kPanel];
    for (size_t k = 0; k < kPanel; ++k) {
      key_scales[k] = a.key_scales != nullptr && k < n ? a.key_scales[keys.id(begin + k)] : 1.0F;
    }
    if (n == kPanel) {
      dot_panel_i8<S>(a, queries, rows, key_scales, n, a.scores + begin, a.score_stride);
      continue;
    }
    float last[kMaxGroup * kPanel];
    dot_panel_i8<S>(a, queries, rows, key_scales, n, last, kPanel);
    for (uint32_t h = 0; h < a.group; ++h) {
      for (size_t k = 0; k < n; ++k) a.scores[h * a.score_stride + begin + k] = last[h * kPanel + k];
    }
  }
}

}  // namespace
}  // namespace keyhole::cpu
