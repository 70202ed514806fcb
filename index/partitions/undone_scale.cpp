#include "index/partitions/undone_scale.h"

#include <algorithm>

#include "cpu/code_layout.h"
#include "index/partitions/ivf_train.h"
#include "index/scan/balance.h"

namespace keyhole::index {
namespace {

// Means that are further from 0 than so many times the channel is wide are looked at.
constexpr double kFar = 4.0;

RowsView view_of(const std::vector<float>& rows, uint32_t dim) {
  return dense_rows(rows.data(), rows.size() / dim, dim, DType::f32);
}

/// Keys of the blocks that learn_balance() would look at, turned back, `[rows, dim]`.
std::vector<float> sample_undone(const cpu::Kernels& kernels, const RowsView& keys,
                                 const RopeUndo& rope) {
  const size_t size = std::min<size_t>(kCodeBlock, keys.tokens);
  const size_t blocks = size == 0 ? 0 : keys.tokens / size;
  const size_t used = std::min(blocks, kBalanceBlocks);
  std::vector<float> sample;
  sample.reserve(used * size * keys.dim);
  for (size_t b = 0; b < used; ++b) {
    const size_t first = b * blocks / used * size;
    const std::vector<float> rows = rows_as_f32(kernels, keys, first, first + size, rope);
    sample.insert(sample.end(), rows.begin(), rows.end());
  }
  return sample;
}

struct Channels {
  std::vector<double> mean, variance;  // [dim]
};

Channels channels_of(const std::vector<float>& rows, uint32_t dim) {
  const auto n = static_cast<double>(rows.size() / dim);
  Channels c{std::vector<double>(dim, 0.0), std::vector<double>(dim, 0.0)};
  for (size_t i = 0; i < rows.size(); ++i) c.mean[i % dim] += rows[i] / n;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double x = rows[i] - c.mean[i % dim];
    c.variance[i % dim] += x * x / n;
  }
  return c;
}

/// What is taken from keys before they are turned back by `rope`, see balanced_undo().
std::vector<float> far_means(const cpu::Kernels& kernels, const RowsView& keys, RopeUndo rope) {
  const uint32_t dim = keys.dim;
  const Channels plain = channels_of(sample_undone(kernels, keys, {}), dim);
  std::vector<float> offset(dim, 0.0F);
  bool some = false;
  for (uint32_t j = 0; j < dim; ++j) {
    if (plain.mean[j] * plain.mean[j] <= kFar * kFar * plain.variance[j]) continue;
    offset[j] = static_cast<float>(plain.mean[j]);
    some = some || offset[j] != 0.0F;
  }
  if (!some) return {};
  const std::vector<double> with = channels_of(sample_undone(kernels, keys, rope), dim).variance;
  rope.set_offset(offset);
  const std::vector<double> without = channels_of(sample_undone(kernels, keys, rope), dim).variance;
  some = false;
  for (uint32_t j = 0; j < dim; ++j) {
    const uint32_t other = rope.partner(j);
    const bool closer = without[j] + without[other] < 0.5 * (with[j] + with[other]);
    if (!closer) offset[j] = 0.0F;
    some = some || offset[j] != 0.0F;
  }
  return some ? offset : std::vector<float>{};
}

}  // namespace

RopeUndo balanced_undo(const cpu::Kernels& kernels, const BuildInput& input, uint32_t dim) {
  RopeUndo rope(input.rope, dim, input.first_position);
  if (!rope.changes() || input.keys.tokens == 0) return rope;
  rope.balance_pairs(
      input.balance != nullptr
          ? input.balance->key_scale
          : learn_balance(kernels, {.keys = input.keys, .values = {}}, input.queries.rows)
                .key_scale);
  rope.set_offset(far_means(kernels, input.keys, rope));
  return rope;
}

std::vector<float> undone_scale(const cpu::Kernels& kernels, const BuildInput& input,
                                const RopeUndo& rope) {
  const uint32_t dim = input.keys.dim;
  const std::vector<float> keys = sample_undone(kernels, input.keys, rope);
  const TrainingQueries& given = input.queries;
  std::vector<float> queries;
  for (size_t i = 0; given.positions != nullptr && i < given.rows.tokens; ++i) {
    float row[kMaxHeadDim];
    float turned[kMaxHeadDim];
    kernels.to_f32[static_cast<size_t>(given.rows.dtype)](given.rows.row(i), row, dim);
    const SearchArgs query = {.queries = row, .group = 1, .position = given.positions[i]};
    const float* undone = rope.queries(query, 0, turned);
    queries.insert(queries.end(), undone, undone + dim);
  }
  return learn_balance(kernels, {.keys = view_of(keys, dim), .values = {}}, view_of(queries, dim))
      .key_scale;
}

}  // namespace keyhole::index
