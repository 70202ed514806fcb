// Keys with one more coordinate, by which all get the same length.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace keyhole::tools {

/// Returns `[rows, d + 1]`: key k becomes (k, sqrt(longest^2 - |k|^2)). A query (q, 0) has the same inner products
/// with these as with the keys, and among vectors of one length the largest inner product is the least distance, so
/// that a graph can be built on them (Bachrach et al., 2014). By raw inner products the nearest neighbour of nearly
/// every key is one of the few longest, and the remaining graph cannot be walked.
[[nodiscard]] inline std::vector<float> lifted_rows(const float* keys, size_t rows, size_t dim) {
  std::vector<double> squares(rows);
  double longest = 0;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t c = 0; c < dim; ++c)
      squares[row] += double{keys[row * dim + c]} * keys[row * dim + c];
    longest = std::max(longest, squares[row]);
  }
  std::vector<float> out;
  out.reserve(rows * (dim + 1));
  for (size_t row = 0; row < rows; ++row) {
    out.insert(out.end(), keys + row * dim, keys + (row + 1) * dim);
    out.push_back(static_cast<float>(std::sqrt(longest - squares[row])));
  }
  return out;
}

}  // namespace keyhole::tools
