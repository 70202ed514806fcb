// Eigenvectors of a symmetric matrix by Jacobi's rotations: some hundred rows at most, where that is quick enough.
#pragma once

#include <cstddef>
#include <vector>

namespace keyhole::tools {

/// The orthonormal eigenvectors of a symmetric matrix `[n, n]`, those of larger eigenvalues first: column j of the
/// returned `[n, n]` row-major matrix is the j-th. Cyclic Jacobi (Golub and Van Loan, Matrix Computations, section
/// 8.5), in double precision.
[[nodiscard]] std::vector<double> symmetric_eigenvectors(std::vector<double> matrix, size_t n);

}  // namespace keyhole::tools
