// The independent truth of the cpu tests: rows decoded by the formats' definition, attention in double, and bounds on
// the error of fp32 arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "tests/cpu/guarded.h"
#include "tests/normal.h"
#include "tests/shapes.h"

namespace keyhole::cpu::test {

/// The content of memory that a kernel must not write.
inline constexpr float kCanary = 12345.5F;

using Rng = std::mt19937_64;

using keyhole::test::kHeadDims;
using keyhole::test::some_head_dim;
inline constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};
/// The dtypes of rows to score and attend; int8 has scales besides.
inline constexpr DType kRowDTypes[] = {DType::f32, DType::f16, DType::bf16, DType::i8};
inline constexpr double kEpsilon = 0x1p-24;  // relative error of one fp32 rounding

inline size_t index_of(DType t) { return static_cast<size_t>(t); }

/// Runs every test of a suite once per level that the machine has.
class EveryLevel : public testing::TestWithParam<Level> {
 protected:
  const Kernels& kernels = *kernels_for(GetParam());
};
#define KEYHOLE_FOR_EVERY_LEVEL(suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(                                                                \
      Cpu, suite, testing::ValuesIn(available_levels().begin(), available_levels().end()), \
      [](const auto& level) { return level_name(level.param); })

/// The value of the bits of a 16-bit format.
inline double decode_half(uint16_t h, DType dtype) {
  const int mantissa_bits = dtype == DType::f16 ? 10 : 7;
  const int bias = dtype == DType::f16 ? 15 : 127;
  const int largest_exponent = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = h >> mantissa_bits & largest_exponent;
  const int mantissa = h & ((1 << mantissa_bits) - 1);
  const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == largest_exponent) return mantissa == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/// The value of an element.
inline double decode(const std::byte* p, DType dtype) {
  if (dtype == DType::f32) {
    float f;
    std::memcpy(&f, p, sizeof f);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return decode_half(h, dtype);
}

/// Rows of a dtype in guarded memory, and their values in double.
class TestRows {
 public:
  /// `value(i, j)` gives the elements. Of `padding` bytes, whole elements lie between rows, and the rest behind the
  /// last row, so that no row is aligned. Rows in int8 begin somewhere in a block of scales.
  template <class Value>
  TestRows(size_t count, uint32_t dim, DType dtype, size_t padding, Value&& value)
      : stride_((dim + padding / dtype_size(dtype)) * dtype_size(dtype)),
        bytes_(count > 0
                   ? (count - 1) * stride_ + dim * dtype_size(dtype) + padding % dtype_size(dtype)
                   : 0),
        first_(dtype == DType::i8 ? (count * 7 + dim) % kScaleRows : 0),
        scales_(dtype == DType::i8 ? (first_ + count + kScaleRows - 1) / kScaleRows * dim : 0),
        view(dense_rows(bytes_.data(), count, dim, dtype)),
        exact(count * dim) {
    view.token_stride = static_cast<ptrdiff_t>(stride_ / dtype_size(dtype));
    if (dtype == DType::i8) {
      for (size_t i = 0; i < count; ++i) {
        for (uint32_t j = 0; j < dim; ++j) exact[i * dim + j] = static_cast<float>(value(i, j));
      }
      view.scales = {scales_.data(), dim, first_};
      quantise();
      return;
    }
    std::vector<float> row(dim);
    const auto encode = kernels_for(Level::scalar)->from_f32[index_of(dtype)];
    for (size_t i = 0; i < count; ++i) {
      for (uint32_t j = 0; j < dim; ++j) row[j] = static_cast<float>(value(i, j));
      std::byte* out = bytes_.data() + i * stride_;
      encode(row.data(), out, dim);
      for (uint32_t j = 0; j < dim; ++j) {
        exact[i * dim + j] = decode(out + j * dtype_size(dtype), dtype);
      }
    }
  }

  [[nodiscard]] const double* row(size_t i) const { return exact.data() + i * view.dim; }

 private:
  /// Replaces each element by the nearest of 255 multiples of a scale: bf16 scales of the blocks' channels, as large
  /// as the largest element needs.
  void quantise() {
    const uint32_t dim = view.dim;
    const size_t blocks = scales_.size() / dim;
    const auto in_block = [&](size_t i, size_t b) { return (first_ + i) / kScaleRows == b; };
    for (size_t b = 0; b < blocks; ++b) {
      for (uint32_t j = 0; j < dim; ++j) {
        double most = 0.0;
        for (size_t i = 0; i < view.tokens; ++i) {
          if (in_block(i, b)) most = std::max(most, std::fabs(exact[i * dim + j]));
        }
        const auto wanted = static_cast<float>(most / 127.0);
        std::byte bits[2];
        kernels_for(Level::scalar)->from_f32[index_of(DType::bf16)](&wanted, bits, 1);
        std::memcpy(&scales_[b * dim + j], bits, 2);
        const double scale = decode(bits, DType::bf16);
        for (size_t i = 0; i < view.tokens; ++i) {
          if (!in_block(i, b)) continue;
          double& x = exact[i * dim + j];
          const double q = scale > 0.0 ? std::clamp(std::nearbyint(x / scale), -127.0, 127.0) : 0.0;
          bytes_.data()[i * stride_ + j] = static_cast<std::byte>(static_cast<int8_t>(q));
          x = scale * q;
        }
      }
    }
  }

  size_t stride_;  // bytes
  GuardedBytes bytes_;
  size_t first_;
  GuardedArray<uint16_t> scales_;

 public:
  RowsView view;
  std::vector<double> exact;  ///< `[count, dim]`
};

inline auto gaussian(Rng& rng, double sigma = 1.0) {
  return [&rng, d = keyhole::test::Normal<double>(0.0, sigma)](auto...) mutable { return d(rng); };
}

inline GuardedArray<float> random_queries(Rng& rng, uint32_t group, uint32_t dim,
                                          double sigma = 1.0) {
  GuardedArray<float> q(size_t{group} * dim);
  auto value = gaussian(rng, sigma);
  for (float& x : q) x = static_cast<float>(value());
  return q;
}

inline std::vector<uint32_t> random_distinct_ids(Rng& rng, size_t rows, size_t n) {
  std::vector<uint32_t> ids(rows);
  std::iota(ids.begin(), ids.end(), 0U);
  std::shuffle(ids.begin(), ids.end(), rng);
  ids.resize(n);
  return ids;
}

/// The number of roundings between a product and the inner product that it enters: scalar code adds one by one, SIMD
/// code has at least 8 lanes and adds those in a tree.
inline double dot_roundings(Level level, uint32_t dim) {
  return level == Level::scalar ? dim + 1.0 : dim / 8.0 + 5.0;
}

/// A state in double, with bounds on the difference that fp32 may have from it.
struct TrueState {
  std::vector<double> o, o_bound;      ///< `[group, dim]`
  std::vector<double> lse, lse_bound;  ///< `[group]`
};

/// Attention of a group over `ids`. First-order error analysis: a logit is off by
///   d_i = eps * (roundings * |scale| * sum|q_j k_j| + 3 |logit|) (+ tanh's error under a soft-cap),
/// a weight by the factor 1 + d_i + c, where c covers e^x and the sums over n tokens; so lse is off by
/// sum w_i d_i + c, and o by sum w_i (d_i + sum w d + 2c) |v_i|.
inline TrueState true_state(const TestRows& k, const TestRows& v, std::span<const uint32_t> ids,
                            const float* queries, uint32_t group, const LogitParams& p,
                            Level level) {
  const uint32_t dim = k.view.dim;
  const size_t n = ids.size();
  TrueState s;
  s.o.assign(size_t{group} * dim, 0.0);
  s.o_bound.assign(size_t{group} * dim, 0.0);
  s.lse.assign(group, -INFINITY);
  s.lse_bound.assign(group, 0.0);
  if (n == 0) return s;
  // SIMD levels sum blocks of 64, then the blocks; scalar code sums V one by one.
  const double sum_roundings = (level == Level::scalar ? n : 64.0) + 3.0 * (n / 64.0) + 16.0;
  const double c = kEpsilon * sum_roundings;
  std::vector<double> logit(n), off(n);
  for (uint32_t h = 0; h < group; ++h) {
    double largest = -INFINITY;
    for (size_t i = 0; i < n; ++i) {
      const double* key = k.row(ids[i]);
      double sum = 0.0;
      double magnitude = 0.0;
      for (uint32_t j = 0; j < dim; ++j) {
        const double product = static_cast<double>(queries[h * dim + j]) * key[j];
        sum += product;
        magnitude += std::fabs(product);
      }
      logit[i] = sum * p.scale;
      off[i] = kEpsilon * (dot_roundings(level, dim) * std::fabs(p.scale) * magnitude);
      if (p.softcap > 0.0F) {
        const double cap = p.softcap;
        logit[i] = cap * std::tanh(logit[i] / cap);
        off[i] += 8.0 * kEpsilon * std::fabs(logit[i]);
      }
      off[i] += 3.0 * kEpsilon * std::fabs(logit[i]);
      largest = std::max(largest, logit[i]);
    }
    double total = 0.0;
    for (const double x : logit) total += std::exp(x - largest);
    s.lse[h] = largest + std::log(total);
    double mean_off = 0.0;
    for (size_t i = 0; i < n; ++i) mean_off += std::exp(logit[i] - s.lse[h]) * off[i];
    s.lse_bound[h] = 1.2 * mean_off + c + 3.0 * kEpsilon * std::fabs(s.lse[h]);
    for (size_t i = 0; i < n; ++i) {
      const double weight = std::exp(logit[i] - s.lse[h]);
      const double* value = v.row(ids[i]);
      for (uint32_t j = 0; j < dim; ++j) {
        s.o[h * dim + j] += weight * value[j];
        s.o_bound[h * dim + j] +=
            std::fabs(value[j]) * (weight * (1.2 * (off[i] + mean_off) + 2.0 * c) + 1e-26);
      }
    }
  }
  return s;
}

/// The output arrays of a state, poisoned and guarded.
struct OutState {
  GuardedArray<float> o, lse;
  OutState(uint32_t group, uint32_t dim)
      : o(size_t{group} * dim, std::nanf("")), lse(group, std::nanf("")) {}
  [[nodiscard]] StateView view() const { return {o.data(), lse.data()}; }
};

/// Fails where a state is further from the truth than `slack` times the bound.
inline void expect_state(const OutState& got, const TrueState& truth, double slack = 1.0) {
  for (size_t h = 0; h < truth.lse.size(); ++h) {
    if (truth.lse[h] == -INFINITY) {
      EXPECT_EQ(got.lse[h], kMinusInf) << "head " << h;
    } else {
      ASSERT_NEAR(got.lse[h], truth.lse[h], slack * truth.lse_bound[h]) << "head " << h;
    }
  }
  const size_t dim = truth.o.size() / truth.lse.size();
  for (size_t i = 0; i < truth.o.size(); ++i) {
    ASSERT_NEAR(got.o[i], truth.o[i], slack * truth.o_bound[i])
        << "head " << i / dim << ", element " << i % dim;
  }
}

}  // namespace keyhole::cpu::test
