#include "tools/caches/symmetric_eigen.h"

#include <Eigen/Eigenvalues>

namespace keyhole::tools {

std::vector<double> symmetric_eigenvectors(const std::vector<double>& matrix, size_t n) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto size = static_cast<Eigen::Index>(n);
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(
      Eigen::Map<const Matrix>(matrix.data(), size, size));
  std::vector<double> vectors(n * n);
  // Eigen has the smallest eigenvalue first.
  Eigen::Map<Matrix>(vectors.data(), size, size) = solver.eigenvectors().rowwise().reverse();
  return vectors;
}

}  // namespace keyhole::tools
