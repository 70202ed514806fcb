// Eigenvectors of a symmetric matrix, by Eigen, which no other header here shows.
#pragma once

#include <cstddef>
#include <vector>

namespace keyhole::tools {

/// The orthonormal eigenvectors of a symmetric matrix `[n, n]`, those of larger eigenvalues first: column j of the
/// returned `[n, n]` row-major matrix is the j-th.
[[nodiscard]] std::vector<double> symmetric_eigenvectors(const std::vector<double>& matrix,
                                                         size_t n);

}  // namespace keyhole::tools
