// The calibration of OSCAR: rotations and quantiles of one KV head from keys, values and queries of a text (arXiv
// 2605.17757; oscar.h has what they are for).
#pragma once

#include <cstdint>
#include <span>

#include "tools/caches/oscar.h"

namespace keyhole::tools {

/// One KV head of a text. Borrowed.
struct OscarSample {
  const float* keys = nullptr;    ///< `[rows, dim]`, after RoPE
  const float* values = nullptr;  ///< `[rows, dim]`
  size_t rows = 0, dim = 0;
  const float* queries = nullptr;       ///< `[positions, group, dim]`, after RoPE
  size_t group = 0;                     ///< query heads of the KV head
  std::span<const uint32_t> positions;  ///< a query attends to the rows up to this one
  float scale = 1.0F;                   ///< logit = scale * q.k
  float softcap = 0.0F;                 ///< > 0: logit = c * tanh(scale * q.k / c)
};

/// Fits keys to the sum of q q^T, and values to the sum of o o^T over outputs o of exact attention: both in double
/// precision, over at most 256 positions, evenly spread. Quantiles are the best of 1, 0.98, 0.96, 0.94, 0.92 and 0.9,
/// over at most 512 rows: of keys the one whose errors e have the least sum of (q.e)^2, of values the least sum of w
/// |e|^2 with w a row's summed squared weights. (The paper fits thresholds offline and does not say on which grid.) The
/// sample has one row and one position at least.
[[nodiscard]] OscarHead fit_oscar(const OscarSample& sample);

/// U H P of a symmetric matrix `[dim, dim]`, dim a power of two.
[[nodiscard]] std::vector<float> oscar_rotation(const std::vector<double>& covariance, size_t dim);

}  // namespace keyhole::tools
