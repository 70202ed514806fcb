#include "index/scan/balance.h"

#include <algorithm>
#include <cmath>

#include "cpu/code_layout.h"
#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

// Without queries, channels wider than this many times the median one are taken for outliers.
constexpr double kOutlier = 4.0;
// Channels whose widths differ by more than this are treated as if they differed by this, so that squares of sums
// stay in range.
constexpr double kWidestScale = 1e6;
// The belief that all channels weigh alike counts as much as this many queries.
constexpr double kPriorQueries = 1.0;
// Neither a scale nor its inverse may leave the range of floats, whatever fp32 keys are.
constexpr float kLeast = 1e-30F;

void add_row(const cpu::Kernels& kernels, const RowsView& rows, size_t i, std::vector<float>& row) {
  cpu::read_row(kernels, rows, i, row.data());
}

/// Mean over blocks of the variance inside a block, per channel.
std::vector<double> variances_inside_blocks(const cpu::Kernels& kernels, const RowsView& rows) {
  const uint32_t dim = rows.dim;
  std::vector<double> total(dim, 0.0);
  if (rows.tokens == 0) return total;
  const size_t size = std::min<size_t>(kCodeBlock, rows.tokens);
  const size_t blocks = rows.tokens / size;
  const size_t used = std::min(blocks, kBalanceBlocks);
  std::vector<float> row(dim);
  std::vector<double> sum(dim), squares(dim);
  for (size_t b = 0; b < used; ++b) {
    const size_t first = b * blocks / used * size;
    std::fill(sum.begin(), sum.end(), 0.0);
    std::fill(squares.begin(), squares.end(), 0.0);
    // About the first row: a large constant offset takes no digits from the squares.
    std::vector<float> origin(dim);
    add_row(kernels, rows, first, origin);
    for (size_t i = 0; i < size; ++i) {
      add_row(kernels, rows, first + i, row);
      for (uint32_t j = 0; j < dim; ++j) {
        const double x = double{row[j]} - origin[j];
        sum[j] += x;
        squares[j] += x * x;
      }
    }
    const auto n = static_cast<double>(size);
    for (uint32_t j = 0; j < dim; ++j) {
      total[j] += std::max(0.0, squares[j] / n - sum[j] / n * (sum[j] / n));
    }
  }
  for (double& t : total) t /= static_cast<double>(used);
  return total;
}

std::vector<double> mean_squares(const cpu::Kernels& kernels, const RowsView& rows) {
  std::vector<double> squares(rows.dim, 0.0);
  std::vector<float> row(rows.dim);
  for (size_t i = 0; i < rows.tokens; ++i) {
    add_row(kernels, rows, i, row);
    for (uint32_t j = 0; j < rows.dim; ++j) squares[j] += double{row[j]} * row[j];
  }
  for (double& s : squares) s /= static_cast<double>(std::max<size_t>(rows.tokens, 1));
  return squares;
}

/// Whether a channel's scale can be told: its keys differ, and queries have it.
bool is_known(double spread, double rms) { return spread > 0.0 && rms > 0.0; }

/// Few queries say little about a channel: one that the only query hardly has would get an s near 0, and outweigh all
/// others in the next query. So means of squares are drawn towards those with which the channel would add as much to
/// logits as the others do on average, which no scaling of channels changes.
void draw_to_average(const std::vector<double>& spread, size_t queries, std::vector<double>& rms) {
  double share = 0.0;
  uint32_t known = 0;
  for (size_t j = 0; j < rms.size(); ++j) {
    if (!is_known(spread[j], rms[j])) continue;
    share += rms[j] * spread[j];
    ++known;
  }
  if (known == 0) return;
  share /= known;
  const auto n = static_cast<double>(queries);
  for (size_t j = 0; j < rms.size(); ++j) {
    if (!is_known(spread[j], rms[j])) continue;
    rms[j] = (n * rms[j] + kPriorQueries * share / spread[j]) / (n + kPriorQueries);
  }
}

/// s without queries: see learn_balance().
void narrow_outliers(const std::vector<double>& spread, std::vector<double>& scale) {
  std::vector<double> known;
  for (const double v : spread) {
    if (v > 0.0) known.push_back(v);
  }
  if (known.empty()) return;
  const auto median = known.begin() + static_cast<std::ptrdiff_t>(known.size() / 2);
  std::nth_element(known.begin(), median, known.end());
  const double widest = kOutlier * kOutlier * *median;
  for (size_t j = 0; j < scale.size(); ++j) {
    if (spread[j] > widest) scale[j] = std::max(std::sqrt(widest / spread[j]), 1.0 / kWidestScale);
  }
}

}  // namespace

bool Balance::is_sound() const {
  const auto sound = [](float s) { return std::isfinite(s) && s > 0.0F; };
  return std::all_of(key_scale.begin(), key_scale.end(), sound) && sound(value_scale);
}

Balance learn_balance(const cpu::Kernels& kernels, const KvView& kv, const RowsView& queries) {
  const uint32_t dim = kv.keys.dim;
  const std::vector<double> spread = variances_inside_blocks(kernels, kv.keys);
  std::vector<double> scale(dim, 1.0);
  if (queries.tokens == 0) {
    narrow_outliers(spread, scale);
  } else {
    std::vector<double> rms = mean_squares(kernels, queries);
    draw_to_average(spread, queries.tokens, rms);
    double log_sum = 0.0;
    uint32_t known = 0;
    const auto usable = [&](uint32_t j) { return is_known(spread[j], rms[j]); };
    for (uint32_t j = 0; j < dim; ++j) {
      if (!usable(j)) continue;
      scale[j] = std::pow(rms[j] / spread[j], 0.25);
      log_sum += std::log(scale[j]);
      ++known;
    }
    const double average = known == 0 ? 1.0 : std::exp(log_sum / known);
    for (uint32_t j = 0; j < dim; ++j) {
      scale[j] = usable(j) ? std::clamp(scale[j], average / kWidestScale, average * kWidestScale)
                           : average;
    }
  }
  double sum = 0.0;
  for (uint32_t j = 0; j < dim; ++j) sum += scale[j] * scale[j] * spread[j];
  const double norm = sum > 0.0 ? 1.0 / std::sqrt(sum / dim) : 1.0;

  Balance out;
  for (const double s : scale)
    out.key_scale.push_back(std::clamp(static_cast<float>(s * norm), kLeast, 1.0F / kLeast));
  double values = 0.0;
  for (const double v : variances_inside_blocks(kernels, kv.values)) values += v;
  if (values > 0.0) {
    // The inverse of a smaller one than 2^-126 is no float.
    const double power = std::clamp(std::round(0.5 * std::log2(values / dim)), -126.0, 126.0);
    out.value_scale = static_cast<float>(std::exp2(power));
  }
  return out;
}

}  // namespace keyhole::index
