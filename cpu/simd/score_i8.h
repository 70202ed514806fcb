// Kernels::score_i8 for every level. S is a level's struct of integer operations:
//   kWidth         int32 lanes of an accumulator
//   kChunk         key elements that one step multiplies
//   prepare_query  copies a query as elements of type Query, padded with zeros to whole chunks; returns
//                  what multiply() will add too much in a whole row
//   load_key       kChunk elements; load_key_part: the first n of them and zeros
//   multiply       acc + products of kChunk elements
#pragma once

#include "cpu/simd/rows.h"

namespace keyhole::cpu {
namespace {

/// Number of heads whose queries are prepared at once: more would need a stack frame that costs more than a short
/// call.
constexpr uint32_t kPreparedHeads = 16;

template <class S>
struct PreparedQueries {
  alignas(64) typename S::Query elements[kPreparedHeads * kMaxHeadDim];
  // Three more than there are heads, because a tile of four may read beyond the last.
  float scales[kPreparedHeads + 3] = {};
  int32_t correction[kPreparedHeads + 3] = {};
  uint32_t padded_dim;

  explicit PreparedQueries(const ScoreI8Args& a) : padded_dim(round_up_to(a.dim, S::kChunk)) {
    for (uint32_t h = 0; h < a.group; ++h) {
      scales[h] = a.query_scales[h];
      correction[h] = S::prepare_query(a.queries + h * a.dim, a.dim, elements + h * padded_dim);
    }
  }
};

/// A panel of S::kWidth keys to score, as in dot.h.
struct PanelI8 {
  const std::byte* const* rows;
  const std::byte* const* ahead;
  bool ahead_tails;
  size_t n;
  uint32_t dim;
  float* out;
  size_t out_stride;
};

/// Scores of a panel for `heads` (1..4) heads from `head` on; the tile of dot.h in integers.
template <class S, uint32_t heads>
[[gnu::noinline]] void dot_tile_i8(const PanelI8& panel, const PreparedQueries<S>& queries,
                                   uint32_t head) {
  using I = typename S::I;
  using F = typename S::F;
  constexpr uint32_t kParts = heads == 3 ? 4 : heads;
  constexpr uint32_t kKeys = S::kWidth / kParts;
  constexpr uint32_t kStep = kKeys < 4 ? kKeys : 4;

  const F scale = S::template repeat_each<kKeys>(queries.scales + head);
  const I correction = S::template repeat_each_i32<kKeys>(queries.correction + head);
  float* out = panel.out + head * panel.out_stride;
  const typename S::Query* q = queries.elements + head * queries.padded_dim;

  for (size_t first = 0; first < panel.n; first += kKeys) {
    I sums[S::kWidth];
#pragma GCC unroll 16
    for (uint32_t i = heads * kKeys; i < S::kWidth; ++i) sums[i] = S::zero_i32();
#pragma GCC unroll 4
    for (uint32_t step = 0; step < kKeys; step += kStep) {
      const std::byte* const* row = panel.rows + first + step;
      if (panel.ahead != nullptr) {
        for (uint32_t k = 0; k < kStep; ++k) {
          prefetch_row(panel.ahead[first + step + k], panel.dim, panel.ahead_tails);
        }
      }
      I acc[heads][kStep];
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::zero_i32();
      }
      const auto multiply = [&](const typename S::Key(&key)[kStep], uint32_t j) {
#pragma GCC unroll 4
        for (uint32_t h = 0; h < heads; ++h) {
          const typename S::Key query = S::load_query(q + h * queries.padded_dim + j);
#pragma GCC unroll 4
          for (uint32_t k = 0; k < kStep; ++k) acc[h][k] = S::multiply(acc[h][k], key[k], query);
        }
      };
      typename S::Key key[kStep];
      uint32_t j = 0;
#pragma GCC unroll 1
      for (; j + S::kChunk <= panel.dim; j += S::kChunk) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) key[k] = S::load_key(row[k] + j);
        multiply(key, j);
      }
      if (j < panel.dim) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) key[k] = S::load_key_part(row[k] + j, panel.dim - j);
        multiply(key, j);
      }
#pragma GCC unroll 4
      for (uint32_t h = 0; h < heads; ++h) {
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kStep; ++k) sums[h * kKeys + step + k] = acc[h][k];
      }
    }
    // Exact integers below 2^24, then one product: the same bits at every level.
    const F dots = S::to_f32(S::sub_i32(S::reduce_each_i32(sums), correction));
    S::template store_parts<kKeys>(S::mul(dots, scale), heads, out + first, panel.out_stride);
  }
}

template <class S>
[[gnu::always_inline]] inline void dot_panel_i8(PanelI8 panel, const PreparedQueries<S>& queries,
                                                uint32_t group) {
  uint32_t h = 0;
  for (; group - h >= 4; h += 4) {
    dot_tile_i8<S, 4>(panel, queries, h);
    panel.ahead = nullptr;
  }
  switch (group - h) {
    case 3: return dot_tile_i8<S, 3>(panel, queries, h);
    case 2: return dot_tile_i8<S, 2>(panel, queries, h);
    case 1: return dot_tile_i8<S, 1>(panel, queries, h);
    default: return;
  }
}

template <class S>
void score_prepared_i8(const ScoreI8Args& a) {
  constexpr size_t kPanel = S::kWidth;
  const Rows keys{reinterpret_cast<const std::byte*>(a.keys), a.key_stride, a.ids, a.count};
  const PreparedQueries<S> queries(a);
  RowBlocks blocks(keys, a.dim);
  blocks.prefetch_first();
  float last[kPreparedHeads * kPanel];
  for (size_t begin = 0; begin < a.count; begin += kBlock) {
    blocks.advance(begin);
    const size_t end = begin + kBlock < a.count ? begin + kBlock : a.count;
    for (size_t i = begin; i < end; i += kPanel) {
      const size_t n = end - i < kPanel ? end - i : kPanel;
      PanelI8 panel{blocks.current() + (i - begin),
                    blocks.has_next ? blocks.next() + (i - begin) : nullptr,
                    blocks.tails,
                    n,
                    a.dim,
                    a.scores + i,
                    a.score_stride};
      if (n < kPanel) {
        panel.out = last;
        panel.out_stride = kPanel;
      }
      dot_panel_i8<S>(panel, queries, a.group);
      for (uint32_t h = 0; n < kPanel && h < a.group; ++h) {
        for (size_t k = 0; k < n; ++k) a.scores[h * a.score_stride + i + k] = last[h * kPanel + k];
      }
    }
  }
}

template <class S>
void score_i8(const ScoreI8Args& a) {
  ScoreI8Args part = a;
  while (part.group > kPreparedHeads) {
    const uint32_t left = part.group - kPreparedHeads;
    part.group = kPreparedHeads;
    score_prepared_i8<S>(part);
    part.group = left;
    part.queries += kPreparedHeads * size_t{a.dim};
    part.query_scales += kPreparedHeads;
    part.scores += kPreparedHeads * a.score_stride;
  }
  score_prepared_i8<S>(part);
}

}  // namespace
}  // namespace keyhole::cpu
