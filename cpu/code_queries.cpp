// Brings queries into the order of the codes of keys, and sums of the codes of values back out of theirs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/code_kernels.h"

namespace keyhole::cpu {
namespace {

// 256 * 127 + 127: both parts are in [-128, 127].
constexpr float kMostQuery = 32639.0F;
// Adding this and subtracting it again rounds to the nearest integer, for which std::nearbyint() needs a call.
constexpr float kRounds = 0x1.8p23F;

}  // namespace

CodeQueryScales prepare_code_query(const CodeShape& shape, const float* q, int8_t* out) {
  const uint32_t per_word = 8 / shape.key_bits;
  const uint32_t words = shape.key_words();
  const size_t part_bytes = code_part_bytes(shape.key_bits, words);
  std::memset(out, 0, kCodeParts * part_bytes);
  float largest = 0.0F;
  bool is_finite = true;
  for (uint32_t j = 0; j < shape.dim; ++j) {
    largest = std::max(largest, std::abs(q[j]));
    is_finite = is_finite && std::isfinite(q[j]);
  }
  if (!is_finite) return {};  // no integers stand for it
  const float scale = largest / kMostQuery;
  const float inverse = scale > 0.0F ? kMostQuery / largest : 0.0F;
  // A scale below the smallest normal number: the query is 0.
  if (!std::isfinite(inverse)) return {};
  int8_t high[kMaxHeadDim], low[kMaxHeadDim];
  int32_t sum = 0, high_sum = 0;
  for (uint32_t j = 0; j < shape.dim; ++j) {
    const auto rounded = static_cast<int32_t>((q[j] * inverse + kRounds) - kRounds);
    const int32_t upper = (rounded + 128) >> 8;
    high[j] = static_cast<int8_t>(upper);
    low[j] = static_cast<int8_t>(rounded - 256 * upper);
    sum += rounded;
    high_sum += upper;
  }
  for (uint32_t j = 0; j < shape.dim; j += 4) {
    const uint32_t step = j / 16;
    const uint32_t word = j % 16 / 4 * (words / 2) + step / per_word;
    int8_t* at = out + (size_t{word} * per_word + step % per_word) * 4;
    std::memcpy(at, high + j, 4);
    std::memcpy(at + part_bytes, low + j, 4);
  }
  const int32_t most = (1 << shape.key_bits) - 1;
  return {{{256.0F * scale, most * high_sum}, {scale, most * sum}}};
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
