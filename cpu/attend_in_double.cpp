// The slow path behind every attend kernel: two passes over the keys, all sums in double, so that neither
// inner products nor sums of finite rows can overflow.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/attention_state.h"
#include "cpu/half.h"
#include "cpu/levels.h"

namespace keyhole::cpu {
namespace {

double element(const std::byte* row, const uint16_t* scales, size_t i, DType dtype) {
  if (dtype == DType::i8) return double{bf16_to_f32(scales[i])} * static_cast<int8_t>(row[i]);
  if (dtype == DType::f32) {
    float f;
    std::memcpy(&f, row + i * sizeof f, sizeof f);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, row + i * sizeof h, sizeof h);
  return dtype == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
}

const uint16_t* scales_of(const RowsView& rows, size_t row) {
  return rows.scales.data != nullptr ? rows.scales.row(row) : nullptr;
}

double inner_product(const AttendArgs& a, DType dtype, uint32_t head, size_t i) {
  const size_t row = a.ids != nullptr ? a.ids[i] : i;
  const std::byte* key = a.keys.row(row);
  const uint16_t* scales = scales_of(a.keys, row);
  const uint32_t dim = a.keys.dim;
  double sum = 0.0;
  for (uint32_t j = 0; j < dim; ++j) {
    sum += static_cast<double>(a.queries[head * dim + j]) * element(key, scales, j, dtype);
  }
  return sum;
}

double inner_product(const AttendScoredArgs& a, DType, uint32_t head, size_t i) {
  return a.scores[head * a.score_stride + i];
}

float to_fp32_range(double x) {
  constexpr double kMax = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(x, -kMax, kMax));  // a NaN (from a NaN input) stays one
}

template <class Args>
void attend_slowly(const Args& a, DType dtype) {
  const uint32_t dim = a.values.dim;
  for (uint32_t h = 0; h < a.group; ++h) {
    double largest = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < a.count; ++i) {
      largest = std::max(largest, logit_of(inner_product(a, dtype, h, i), a.logits));
    }
    double o[kMaxHeadDim] = {};
    double sum = 0.0;
    for (size_t i = 0; i < a.count; ++i) {
      const size_t row = a.ids != nullptr ? a.ids[i] : i;
      const double weight = std::exp(logit_of(inner_product(a, dtype, h, i), a.logits) - largest);
      sum += weight;
      const std::byte* value = a.values.row(row);
      const uint16_t* scales = scales_of(a.values, row);
      for (uint32_t j = 0; j < dim; ++j) o[j] += weight * element(value, scales, j, dtype);
    }
    a.lse[h] = a.count > 0 ? to_fp32_range(largest + std::log(sum)) : kMinusInf;
    for (uint32_t j = 0; j < dim; ++j) {
      a.o[h * dim + j] = a.count > 0 ? to_fp32_range(o[j] / sum) : 0.0F;
    }
  }
}

}  // namespace

void attend_in_double(const AttendArgs& a, DType dtype) { attend_slowly(a, dtype); }

// Infinite scores make the sum of the weights NaN, and therefore the lse.
void attend_scored_in_double(const AttendScoredArgs& a, DType dtype) { attend_slowly(a, dtype); }

}  // namespace keyhole::cpu
