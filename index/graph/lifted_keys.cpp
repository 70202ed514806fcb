#include "index/graph/lifted_keys.h"

#include <algorithm>
#include <cmath>

#include "cpu/row_access.h"

namespace keyhole::index {
namespace {

constexpr double kLargestHalf = 60000.0;

std::vector<double> widened(std::span<const float> given, uint32_t dim, double otherwise) {
  if (given.empty()) return std::vector<double>(dim, otherwise);
  return {given.begin(), given.end()};
}

// The i-th of `rows`; i itself where `rows` is empty, which stands for all.
size_t row_at(std::span<const uint32_t> rows, size_t i) { return rows.empty() ? i : rows[i]; }

std::vector<float> mean_key(const cpu::Kernels& kernels, const RowsView& keys,
                            std::span<const uint32_t> rows, size_t count) {
  std::vector<double> sum(keys.dim, 0.0);
  std::vector<float> row(keys.dim);
  for (size_t i = 0; i < count; ++i) {
    cpu::read_row(kernels, keys, row_at(rows, i), row.data());
    for (uint32_t j = 0; j < keys.dim; ++j) sum[j] += row[j];
  }
  const auto n = static_cast<double>(std::max<size_t>(count, 1));
  for (uint32_t j = 0; j < keys.dim; ++j) row[j] = static_cast<float>(sum[j] / n);
  return row;
}

double squared_norm(const double* x, uint32_t dim) {
  double sum = 0.0;
  for (uint32_t j = 0; j < dim; ++j) sum += x[j] * x[j];
  return sum;
}

}  // namespace

Lift Lift::of(const cpu::Kernels& kernels, const RowsView& keys, std::span<const float> scale,
              double quantile, std::span<const uint32_t> rows) {
  Lift lift;
  const size_t count = rows.empty() ? keys.tokens : rows.size();
  lift.center = mean_key(kernels, keys, rows, count);
  if (count == 0) return lift;
  const std::vector<double> scales = widened(scale, keys.dim, 1.0);
  std::vector<double> norms(count);
  float row[kMaxHeadDim];
  double x[kMaxHeadDim];
  for (size_t i = 0; i < count; ++i) {
    cpu::read_row(kernels, keys, row_at(rows, i), row);
    for (uint32_t j = 0; j < keys.dim; ++j) x[j] = scales[j] * (double{row[j]} - lift.center[j]);
    norms[i] = squared_norm(x, keys.dim);
  }
  const auto at =
      norms.begin() + static_cast<std::ptrdiff_t>(quantile * static_cast<double>(count - 1));
  std::nth_element(norms.begin(), at, norms.end());
  lift.radius = std::sqrt(*at);
  return lift;
}

void Lift::save(Writer& out) const {
  out.put(radius);
  out.put(static_cast<uint32_t>(center.size()));
  out.put_array(center.data(), center.size());
}

Lift Lift::load(Reader& in, uint32_t dim) {
  Lift lift;
  lift.radius = in.get<double>();
  require_sound(std::isfinite(lift.radius) && lift.radius >= 0.0, "an impossible radius");
  const auto elements = in.get<uint32_t>();
  require_sound(elements == 0 || elements == dim, "a centre of another dimension");
  lift.center = in.get_array<float>(elements);
  require_sound(
      std::all_of(lift.center.begin(), lift.center.end(), [](float c) { return std::isfinite(c); }),
      "a centre that is not finite");
  return lift;
}

LiftedKeys::LiftedKeys(const cpu::Kernels& kernels, const RowsView& keys, const Lift& lift,
                       std::span<const float> scale)
    : kernels_(&kernels),
      keys_(keys),
      center_(widened(lift.center, keys.dim, 0.0)),
      scale_(widened(scale, keys.dim, 1.0)),
      is_lifted_(lift.radius != 0.0),
      extra_(keys.tokens, 0.0F) {
  if (!is_lifted_) return;
  double x[kMaxHeadDim];
  for (size_t i = 0; i < keys.tokens; ++i) {
    place(i, x);
    const double rest = lift.radius * lift.radius - squared_norm(x, keys.dim);
    extra_[i] = static_cast<float>(std::sqrt(std::max(rest, 0.0)));
  }
}

void LiftedKeys::place(size_t row, double* x) const {
  float key[kMaxHeadDim];
  cpu::read_row(*kernels_, keys_, row, key);
  for (uint32_t j = 0; j < keys_.dim; ++j) x[j] = scale_[j] * (double{key[j]} - center_[j]);
}

double LiftedKeys::square(size_t row) const {
  double x[kMaxHeadDim];
  place(row, x);
  return squared_norm(x, keys_.dim);
}

std::vector<std::byte> LiftedKeys::copy(std::span<const uint32_t> rows) const {
  const DType dtype = copy_dtype();
  const size_t row_bytes = keys_.dim * dtype_size(dtype);
  const size_t count = rows.empty() ? keys_.tokens : rows.size();
  std::vector<std::byte> out(count * row_bytes);
  double x[kMaxHeadDim];
  float narrow[kMaxHeadDim];
  const double most = dtype == DType::f16 ? kLargestHalf : 1e30;
  for (size_t i = 0; i < count; ++i) {
    place(row_at(rows, i), x);
    for (uint32_t j = 0; j < keys_.dim; ++j) {
      narrow[j] = static_cast<float>(std::clamp(x[j], -most, most));
    }
    kernels_->from_f32[static_cast<size_t>(dtype)](narrow, out.data() + i * row_bytes, keys_.dim);
  }
  return out;
}

void LiftedKeys::load(uint32_t row, Query& query) const {
  if (!is_lifted_) {
    cpu::read_row(*kernels_, keys_, row, query.elements);
    query.extra = query.shift = 0.0F;
    return;
  }
  double x[kMaxHeadDim];
  place(row, x);
  double shift = 0.0;
  for (uint32_t j = 0; j < keys_.dim; ++j) {
    const double y = x[j] * scale_[j];
    query.elements[j] = static_cast<float>(y);
    shift += y * center_[j];
  }
  query.extra = extra_[row];
  query.shift = static_cast<float>(shift);
}

void LiftedKeys::similarity(const Query& query, const uint32_t* ids, size_t n, float* out) const {
  cpu::score_rows(*kernels_, keys_, query.elements, 1, ids, n, out, n);
  for (size_t i = 0; i < n; ++i) out[i] += query.extra * extra_[ids[i]] - query.shift;
}

}  // namespace keyhole::index
