// The matrices of one layer in fp32, for products with many tokens at once.
#pragma once

#include <cstddef>
#include <vector>

#include "tools/llama/weights.h"

namespace keyhole::tools {

/// A matrix in fp32. Parts that are fp32 in their file are used where they lie; the others are converted into room
/// that the next matrix uses again.
class MatrixF32 {
 public:
  /// Converts the matrix, spread over the team.
  void convert(const Matrix& matrix, Team& team);

  /// Computes Y = X W^T + beta * Y on the calling thread; X `[n, cols]` with `x_stride` numbers from row to row, Y
  /// `[n, rows]` with y_stride. SingleThreadedBlas must be alive.
  void multiply(size_t n, const float* x, size_t x_stride, float beta, float* y,
                size_t y_stride) const;
  [[nodiscard]] size_t rows() const { return rows_; }
  [[nodiscard]] size_t cols() const { return cols_; }

 private:
  struct Part {
    size_t rows;
    const float* data;
  };
  size_t rows_ = 0, cols_ = 0;
  std::vector<Part> parts_;
  std::vector<float> room_;
};

/// One layer's matrices: 0.9 GB for a model with 8 billion weights, of which all layers together would take 28.
struct LayerF32 {
  MatrixF32 qkv, output, gate_up, down;

  void convert(const LayerWeights& weights, Team& team);
};

}  // namespace keyhole::tools
