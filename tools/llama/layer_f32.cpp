#include "tools/llama/layer_f32.h"

#include <algorithm>

#include "tools/llama/blas.h"

namespace keyhole::tools {

void MatrixF32::convert(const Matrix& matrix, Team& team) {
  rows_ = matrix.rows;
  cols_ = matrix.cols;
  const auto lies_in_fp32 = [](const MatrixPart& part) { return part.type == ElementType::f32; };
  if (std::all_of(matrix.parts.begin(), matrix.parts.end(), lies_in_fp32)) {
    parts_.clear();
    for (const MatrixPart& part : matrix.parts) {
      parts_.push_back({part.rows, reinterpret_cast<const float*>(part.data)});
    }
    return;
  }
  if (room_.size() < rows_ * cols_) room_.resize(rows_ * cols_);
  parts_ = {{rows_, room_.data()}};
  const size_t step = std::max<size_t>(1, (size_t{256} << 10) / cols_);
  team.for_each((rows_ + step - 1) / step, [&](size_t item, unsigned) {
    const size_t first = item * step;
    matrix.rows_to_f32(first, std::min(first + step, rows_), room_.data() + first * cols_);
  });
}

void MatrixF32::multiply(size_t n, const float* x, size_t x_stride, float beta, float* y,
                         size_t y_stride) const {
  for (const Part& part : parts_) {
    gemm_nt(n, part.rows, cols_, x, x_stride, part.data, cols_, beta, y, y_stride);
    y += part.rows;
  }
}

void LayerF32::convert(const LayerWeights& weights, Team& team) {
  qkv.convert(weights.qkv, team);
  output.convert(weights.output, team);
  gate_up.convert(weights.gate_up, team);
  down.convert(weights.down, team);
}

}  // namespace keyhole::tools
