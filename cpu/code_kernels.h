// Arguments of the kernels of codes (cpu/code_layout.h says where every bit lies): log weights of rows by the codes
// of their keys, and weighted sums of the codes of their values. All sums over codes are sums of integers, so that
// every level gives the same; the rest is fp32.
//
// A query is rounded to 16 bits of its largest component and lies in two parts of 8 bits. Two parts move a score by
// 1e-5 of |q| |k| at most. The first alone is the query rounded to 8 bits, at half the products: a score then moves
// by a fiftieth of what 2-bit codes move it by, and by a fifteenth of what 4-bit codes do. Weights of values
// likewise: rounded to 16 bits of the largest of a call, or to 8.
#pragma once

#include "cpu/code_layout.h"
#include "cpu/types.h"

namespace keyhole::cpu {

/// A query, or the weights of values, are held in so many parts of 8 bits.
inline constexpr uint32_t kCodeParts = 2;

/// Bytes of one part of a query: four components for each word of a row and each of the codes in its bytes.
[[nodiscard]] constexpr size_t code_part_bytes(uint32_t bits, uint32_t words) {
  return size_t{2} * words * (8 / bits) * 4;
}
/// Bytes of one query in the order of the codes: [2 parts, high first][2 key_words() words of a row][8 / bits
/// shifts][4]. Word c key_words() / 2 + g of a row is word 2 g of lane c of its four.
[[nodiscard]] constexpr size_t code_query_bytes(const CodeShape& shape) {
  return kCodeParts * code_part_bytes(shape.key_bits, shape.key_words());
}

/// How sums of a rounded query's products turn into scores.
struct CodeQueryScale {
  float scale;  ///< a unit of the sum of the parts in use
  int32_t sum;  ///< (2^bits - 1) * sum of the rounded components, in that unit
};
struct CodeQueryScales {
  CodeQueryScale of[kCodeParts];  ///< with one part, with two
};

/// Writes code_query_bytes() of the query `q` `[dim]`, which is in the space of the codes.
CodeQueryScales prepare_code_query(const CodeShape& shape, const float* q, int8_t* out);

/// Computes log weights of tiles of 16 keys by their codes for a group. For row i:
///     score = f_i * <q_h, level_i> + offsets[h]
///     scores[h * stride + i] = logit(score) - min(slope^2 f_i^2 noises[h] / 2, kMostNoiseBias),
/// where slope is the derivative of the logit by the score. With a logit scale of 1 and noises of 0 it gives the
/// score.
struct ScoreCodesArgs {
  uint32_t bits;             ///< CodeShape::key_bits
  uint32_t words;            ///< CodeShape::key_words()
  const std::byte* codes;    ///< `[tiles, 32, words]` uint32
  const std::byte* factors;  ///< `[tiles, 16, 2]` fp16: f, g
  uint32_t tiles;
  uint32_t parts;                 ///< how many parts of the queries are used: 1, 2
  const int8_t* queries;          ///< `[group]` of code_query_bytes()
  const CodeQueryScales* scales;  ///< `[group]`
  uint32_t group;
  const float* offsets;  ///< `[group]`
  const float* noises;   ///< `[group]` |q|^2 * the block's noise
  LogitParams logits;
  float* scores;  ///< out
  size_t stride;  ///< elements between heads, >= 16 * tiles
  float* maxima;  ///< out `[group]`: the largest log weight
  /// In and out `[group]`; null: `above` is not wanted. A floor is raised to a log weight that `wanted` rows of the
  /// call reach, where the level knows one.
  float* floors;
  uint32_t wanted;
  uint16_t* above;  ///< out `[group, tiles]`: bit i: the log weight of row i is not below the floor
  const std::byte* ahead;  ///< memory that will be read next, `ahead_bytes` of it; null: not known
  size_t ahead_bytes;
  float* widest = nullptr;  ///< out, the largest f_i of the call; null: not wanted
};

/// Number of floats of one head's sum of value codes. They lie in the order of the codes, so that no kernel shuffles.
[[nodiscard]] constexpr size_t code_sum_size(const CodeShape& shape) {
  return shape.value_bits == 0 ? 0 : size_t{256} / shape.value_bits * shape.value_words() + 16;
}
/// Writes the sum of g * level, `[dim]`, that a sum in the order of the codes stands for.
void fold_code_sum(const CodeShape& shape, const float* sum, float* out);

/// Computes sums = sums * rescales + (sum over the tiles' rows of e^(log weight - top) * g * level), and the sums of
/// the weights.
struct SumCodesArgs {
  uint32_t bits;             ///< CodeShape::value_bits; 0: weights alone
  uint32_t words;            ///< CodeShape::value_words()
  const std::byte* codes;    ///< `[tiles, 32, words]` uint32
  const std::byte* factors;  ///< `[tiles, 16, 2]` fp16: f, g >= 0
  uint32_t tiles;            ///< at most kCodeTiles
  uint32_t parts;            ///< parts of 8 bits to which weights are rounded: 1, 2
  const float* log_weights;  ///< log_weights[h * stride + i]; -inf weighs nothing
  size_t stride;
  uint32_t group;
  const float* tops;       ///< `[group]` finite, at least the largest log weight
  const float* rescales;   ///< `[group]`
  float* sums;             ///< in and out `[group, sum_size]`
  size_t sum_size;         ///< code_sum_size()
  float* weight_sums;      ///< out `[group]`: sums of the weights
  const std::byte* ahead;  ///< as in ScoreCodesArgs
  size_t ahead_bytes;
};

}  // namespace keyhole::cpu
