// Eigen as the classifier's training uses it: row-major matrices over plain arrays.
#pragma once

// Products are those of OpenBLAS, whose kernels fit the machine; Eigen's own would be those of plain x86-64.
#define EIGEN_USE_BLAS
#include <Eigen/Dense>
#include <cstddef>
#include <vector>

namespace keyhole::tools {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::RowVectorXf;

/// Arrays of numbers as matrices and rows, without a copy.
inline auto as_matrix(const float* data, size_t rows, size_t columns) {
  return Eigen::Map<const Matrix>(data, static_cast<Eigen::Index>(rows),
                                  static_cast<Eigen::Index>(columns));
}
inline auto as_matrix(std::vector<float>& data, size_t columns) {
  return Eigen::Map<Matrix>(data.data(), static_cast<Eigen::Index>(data.size() / columns),
                            static_cast<Eigen::Index>(columns));
}
inline auto as_matrix(const std::vector<float>& data, size_t columns) {
  return as_matrix(data.data(), data.size() / columns, columns);
}
inline auto as_row(std::vector<float>& data) {
  return Eigen::Map<RowVector>(data.data(), static_cast<Eigen::Index>(data.size()));
}
inline auto as_row(const std::vector<float>& data) {
  return Eigen::Map<const RowVector>(data.data(), static_cast<Eigen::Index>(data.size()));
}

/// The sum of every column, added row by row, as the numbers lie in memory: Eigen's colwise() goes down a few columns
/// at a time, whose rows of 4 KiB all fall into the same sets of the cache.
template <class Rows>
RowVector column_sums(const Rows& rows) {
  RowVector sums = RowVector::Zero(rows.cols());
  for (Eigen::Index i = 0; i < rows.rows(); ++i) sums += rows.row(i);
  return sums;
}

/// Replaces every row by its log softmax.
template <class Logits>
void log_softmax(Logits&& z) {
  z.colwise() -= z.rowwise().maxCoeff().eval();
  z.colwise() -= z.array().exp().rowwise().sum().log().matrix().eval();
}

}  // namespace keyhole::tools
