// What the kernels of codes take (cpu/code_layout.h says where every bit lies): scores of rows by the codes of their
// keys, what the rows weigh, and weighted sums of the codes of their values. All sums over codes are sums of
// integers, so that every level gives the same; the rest is fp32.
//
// A query is rounded to 15 bits and a sign, which moves a score by 1e-5 of |q| |k| at most, and lies in two parts of 8
// bits in the order of a pair of rows (prepare_code_query). Weights are rounded to 15 bits of the largest of a call.
#pragma once

#include "cpu/code_layout.h"
#include "cpu/types.h"

namespace keyhole::cpu {

/// Bytes of one query in the order of the codes: [2 parts, high first][8 / bits shifts][a row pair's words].
[[nodiscard]] constexpr size_t code_query_bytes(const CodeShape& shape) {
  return size_t{2} * (8 / shape.key_bits) * 16 * shape.key_words();
}

/// One rounded query.
struct CodeQueryParts {
  float scale;  ///< a unit of the parts' sum
  int32_t sum;  ///< (2^bits - 1) * sum of the rounded components
};

/// Writes code_query_bytes() of the query `q` `[dim]`, which is in the space of the codes.
CodeQueryParts prepare_code_query(const CodeShape& shape, const float* q, int8_t* out);

/// Inner products of a group with tiles of 16 keys by their codes: scores[h * stride + i] of row i is
///     f_i * <q_h, level_i> + offsets[h].
struct ScoreCodesArgs {
  uint32_t bits;             ///< CodeShape::key_bits
  uint32_t words;            ///< CodeShape::key_words()
  const std::byte* codes;    ///< `[tiles, 32, words]` uint32
  const std::byte* factors;  ///< `[tiles, 16, 2]` fp16: f, g
  uint32_t tiles;
  const int8_t* queries;        ///< `[group]` of code_query_bytes()
  const CodeQueryParts* parts;  ///< `[group]`
  uint32_t group;
  const float* offsets;  ///< `[group]`
  float* scores;
  size_t stride;           ///< elements between heads, >= 16 * tiles
  const std::byte* ahead;  ///< will be read next, `ahead_bytes` of it; null: not known
  size_t ahead_bytes;
};

/// Turns scores into log weights, in place: logit - t/2, t = slope^2 f^2 * noises[h], where slope is the derivative of
/// the logit by the score.
struct WeighCodesArgs {
  float* scores;  ///< scores[h * stride + i]
  size_t stride;
  uint32_t group;
  uint32_t tiles;
  const std::byte* factors;  ///< `[tiles, 16, 2]` fp16: f, g
  const float* noises;       ///< `[group]` |q|^2 * the block's noise
  LogitParams logits;
  float* maxima;  ///< out `[group]`: the largest log weight
};

/// Floats of one head's sum of value codes: in the order of the codes, so that no kernel shuffles.
[[nodiscard]] constexpr size_t code_sum_size(const CodeShape& shape) {
  return shape.value_bits == 0 ? 0 : size_t{256} / shape.value_bits * shape.value_words() + 16;
}
/// The sum of g * level, `[dim]`, that such a sum stands for.
void fold_code_sum(const CodeShape& shape, const float* sum, float* out);

/// sums = sums * rescales + (sum over the tiles' rows of e^(log weight - top) * g * level), and the weights' sums.
struct SumCodesArgs {
  uint32_t bits;             ///< CodeShape::value_bits; 0: weights alone
  uint32_t words;            ///< CodeShape::value_words()
  const std::byte* codes;    ///< `[tiles, 32, words]` uint32
  const std::byte* factors;  ///< `[tiles, 16, 2]` fp16: f, g >= 0
  uint32_t tiles;            ///< at most kCodeTiles
  const float* log_weights;  ///< log_weights[h * stride + i]; -inf weighs nothing
  size_t stride;
  uint32_t group;
  const float* tops;       ///< `[group]` finite, at least the largest log weight
  const float* rescales;   ///< `[group]`
  float* sums;             ///< in and out `[group, sum_size]`
  size_t sum_size;         ///< code_sum_size()
  float* weight_sums;      ///< out `[group]`: of the weights
  const std::byte* ahead;  ///< as in ScoreCodesArgs
  size_t ahead_bytes;
};

}  // namespace keyhole::cpu
