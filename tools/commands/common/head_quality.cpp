#include "tools/commands/common/head_quality.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>

#include "tools/commands/common/quantile.h"

namespace keyhole::tools {
namespace {

double dot(const float* a, const float* b, size_t n) {
  double sums[8] =
      {};  // side by side: every attended key is scored here, which may be all there are
  for (size_t i = 0; i < n; ++i) sums[i % 8] += double{a[i]} * b[i];
  return std::accumulate(std::begin(sums), std::end(sums), 0.0);
}

double norm(const float* a, size_t n) { return std::sqrt(dot(a, a, n)); }

// How far the score of a key may lie below the k-th best and still count as found, relative to
// |q| |k|. Two fp32 sums of the same products in another order differ by about 1e-6; rounding the
// components of a key independently by up to u moves its score by about u / sqrt(d), of which we
// allow four.
double tie_tolerance(keyhole_dtype kv_dtype, bool rounds_keys, size_t dim) {
  constexpr double kSummation = 1e-5;
  if (!rounds_keys) return kSummation;
  const double unit = kv_dtype == KEYHOLE_BF16 ? 0x1p-9 : 0x1p-12;
  return kSummation + 4 * unit / std::sqrt(static_cast<double>(dim));
}

}  // namespace

Percentiles percentiles(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {nearest_rank(samples, 0.50), nearest_rank(samples, 0.95), nearest_rank(samples, 0.99)};
}

OutputError summarise(std::vector<double> errors) {
  const double mean =
      std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
  const Percentiles p = percentiles(std::move(errors));
  return {mean, p.p50, p.p95};
}

double output_error(const HeadTruth& truth, size_t row, const float* o, double lse) {
  const double resident_lse = truth.resident_lse[row];
  const double top = std::max(lse, resident_lse);
  // Both sets empty: the output is zero, and all of the truth is missing.
  double index_share = 0;
  double resident_share = 0;
  if (std::isfinite(top)) {
    index_share = std::exp(lse - top);
    resident_share = std::exp(resident_lse - top);
    const double sum = index_share + resident_share;
    index_share /= sum;
    resident_share /= sum;
  }
  const float* exact = truth.output.data() + row * truth.dim;
  const float* resident = truth.resident_output.data() + row * truth.dim;
  double difference = 0;
  for (size_t i = 0; i < truth.dim; ++i) {
    const double error = index_share * o[i] + resident_share * resident[i] - exact[i];
    difference += error * error;
  }
  return std::sqrt(difference) / norm(exact, truth.dim);
}

RowJudge::RowJudge(const HeadTruth& truth, keyhole_dtype kv_dtype, bool rounds_keys)
    : truth_(truth), tolerance_(tie_tolerance(kv_dtype, rounds_keys, truth.dim)) {}

std::vector<uint32_t> RowJudge::distinct(std::span<const uint32_t> rows) const {
  std::vector<uint32_t> out(rows.begin(), rows.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  if (!out.empty() && out.back() >= truth_.offloaded.count()) {
    throw std::runtime_error("the index returned row " + std::to_string(out.back()) + " of " +
                             std::to_string(truth_.offloaded.count()));
  }
  return out;
}

FoundRows RowJudge::look_at(size_t row, const std::vector<uint32_t>& ids) const {
  const float* q = truth_.query(row);
  const double slack = tolerance_ * norm(q, truth_.dim);
  const double certain = truth_.kth_score[row];
  FoundRows found;
  for (const uint32_t id : ids) {
    const float* key = truth_.offloaded_key(id);
    const double score = dot(q, key, truth_.dim);
    found.mass += std::exp(truth_.logit(score) - truth_.lse[row]);
    if (score >= certain || score >= certain - slack * norm(key, truth_.dim)) ++found.hits;
  }
  return found;
}

double RowJudge::resident_mass(size_t row) const {
  return std::exp(truth_.resident_lse[row] - truth_.lse[row]);
}

double RowJudge::share(size_t hits) const {
  return static_cast<double>(std::min(hits, truth_.k)) / static_cast<double>(truth_.k);
}

}  // namespace keyhole::tools
