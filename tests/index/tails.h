// Keys, values and trees of the tests of tails, and the public parts of a tree in double.
#pragma once

#include <sstream>

#include "index/tail/tail_tree.h"
#include "tests/index/keys.h"

namespace keyhole::index::test {

/// K and V of one head, in memory that does not move.
class KvRows {
 public:
  KvRows(size_t capacity, uint32_t dim, DType dtype)
      : keys(capacity, dim, dtype), values(capacity, dim, dtype) {}

  /// Adds rows after those that are there.
  void add(const std::vector<float>& k, const std::vector<float>& v) {
    values.put(count(), v);
    keys.put(count(), k);
  }
  /// Makes rows [n, ...) unusable.
  void cut(size_t n) {
    keys.poison(n);
    values.poison(n);
  }
  [[nodiscard]] size_t count() const { return keys.count(); }
  [[nodiscard]] uint32_t dim() const { return keys.dim(); }
  [[nodiscard]] KvView view() const { return {keys.view(), values.view()}; }
  [[nodiscard]] KvView view(size_t n) const { return {keys.view(n), values.view(n)}; }

  Keys keys, values;
};

inline std::vector<double> decoded(const RowsView& rows, size_t i) {
  float row[kMaxHeadDim];
  cpu::kernels_for(cpu::Level::scalar)
      ->to_f32[static_cast<size_t>(rows.dtype)](rows.row(i), row, rows.dim);
  return {row, row + rows.dim};
}

/// A view of rows `[count, dim]` of a dtype, one after the other.
inline RowsView packed_rows(const std::vector<std::byte>& bytes, uint32_t dim, DType dtype) {
  const size_t stride = dim * dtype_size(dtype);
  return dense_rows(bytes.data(), bytes.size() / stride, dim, dtype);
}

/// The largest relative error of rounding to a dtype.
inline double rounding_of(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : (dtype == DType::f16 ? 0x1p-11 : 0x1p-8);
}
/// The absolute error of rounding its smallest numbers.
inline double smallest_step(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : 0x1p-130; }

/// The centre and scales of the codes, as they are saved.
struct CodeScales {
  std::vector<float> center, scales;
};
inline CodeScales scales_of(const TailTree& tree) {
  std::stringstream stream;
  Writer out(stream);
  tree.codes().save(out);
  Reader in(stream);
  CodeScales s;
  s.center = in.get_array<float>(tree.dim());
  s.scales = in.get_array<float>(tree.dim());
  return s;
}

/// The mean key that partition i of a level stands for.
inline std::vector<double> decoded_mean(const TailLevel& level, const CodeScales& s, size_t i) {
  const size_t dim = s.center.size();
  std::vector<double> key(dim);
  for (size_t j = 0; j < dim; ++j) {
    key[j] = double{s.center[j]} + double{s.scales[j]} * level.keys[i * dim + j];
  }
  return key;
}

inline std::string saved_bytes(const TailTree& tree) {
  std::ostringstream stream;
  Writer out(stream);
  tree.save(out);
  out.finish();
  return stream.str();
}

/// The rows of a coarse partition.
inline std::vector<uint32_t> rows_of_coarse(const TailTree& tree, size_t c) {
  std::vector<uint32_t> rows;
  for (uint32_t f = tree.fine_begin(c); f < tree.fine_begin(c + 1); ++f) {
    rows.insert(rows.end(), tree.rows_of(f).begin(), tree.rows_of(f).end());
  }
  return rows;
}

inline double dot(const std::vector<double>& a, const float* b) {
  double sum = 0.0;
  for (size_t j = 0; j < a.size(); ++j) sum += a[j] * b[j];
  return sum;
}

}  // namespace keyhole::index::test
