// Queries in the order of the codes of keys, and sums of the codes of values back from theirs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/code_kernels.h"

namespace keyhole::cpu {
namespace {

// 256 * 127 + 127: both parts are in [-128, 127].
constexpr float kMostQuery = 32639.0F;

}  // namespace

CodeQueryParts prepare_code_query(const CodeShape& shape, const float* q, int8_t* out) {
  const uint32_t per_word = 8 / shape.key_bits;
  const size_t pair_bytes = size_t{16} * shape.key_words();
  const size_t part_bytes = per_word * pair_bytes;
  std::memset(out, 0, 2 * part_bytes);
  float largest = 0.0F;
  for (uint32_t j = 0; j < shape.dim; ++j) largest = std::max(largest, std::abs(q[j]));
  CodeQueryParts parts{largest / kMostQuery, 0};
  const float inverse = parts.scale > 0.0F ? kMostQuery / largest : 0.0F;
  // A scale below the smallest normal number: the query is 0.
  if (!std::isfinite(inverse)) return {0.0F, 0};
  int8_t high[kMaxHeadDim], low[kMaxHeadDim];
  for (uint32_t j = 0; j < shape.dim; ++j) {
    const auto rounded = static_cast<int32_t>(std::nearbyint(q[j] * inverse));
    const int32_t upper = (rounded + 128) >> 8;
    high[j] = static_cast<int8_t>(upper);
    low[j] = static_cast<int8_t>(rounded - 256 * upper);
    parts.sum += rounded;
  }
  // Four components lie in the four bytes of a word, alike for both rows of a pair.
  for (uint32_t j = 0; j < shape.dim; j += 4) {
    const CodePlace place = shape.key_place(0, j);
    int8_t* at = out + place.shift / shape.key_bits * pair_bytes + size_t{place.word} * 4;
    for (int row = 0; row < 2; ++row, at += 4) {
      std::memcpy(at, high + j, 4);
      std::memcpy(at + part_bytes, low + j, 4);
    }
  }
  parts.sum *= (1 << shape.key_bits) - 1;
  return parts;
}

void fold_code_sum(const CodeShape& shape, const float* sum, float* out) {
  const uint32_t words = shape.value_words();
  const size_t kind = size_t{kCodeLanes} * words;  // sums of one slot of every word
  const auto most = static_cast<float>((1U << shape.value_bits) - 1);
  const float weights = sum[code_sum_size(shape) - 16];
  for (uint32_t j = 0; j < shape.dim; ++j) {
    const CodePlace place = shape.value_place(0, j);
    const uint32_t slot = place.shift / shape.value_bits;
    const float* at = sum + (slot / 4 * 2 + slot % 2) * kind + place.word;
    const float all = (at[0] + at[words]) + (at[2 * words] + at[3 * words]);  // 4 lanes: row pairs
    out[j] = 2.0F * all - most * weights;
  }
}

}  // namespace keyhole::cpu
