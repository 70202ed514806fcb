// A matrix of a model in the dtype of its file, read where it lies.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/files/safetensors.h"
#include "tools/llama/team.h"

namespace keyhole::tools {

/// Rows of a matrix that lie one after the other, mostly in a tensor of a mapped file. Borrowed; aligned to its
/// numbers.
struct MatrixPart {
  size_t rows = 0;
  ElementType type = ElementType::f32;  ///< f32, f16 or bf16
  const std::byte* data = nullptr;
};

/// A row-major matrix `[rows, cols]`; a linear layer computes y = W x (torch's layout). Projections that read the same
/// input are one matrix of several parts, one below the other, so that nothing has to be copied.
struct Matrix {
  size_t rows = 0;
  size_t cols = 0;
  std::vector<MatrixPart> parts;

  [[nodiscard]] size_t bytes() const;
  /// Converts rows [first, last) to fp32, `[last - first, cols]`; exact.
  void rows_to_f32(size_t first, size_t last, float* out) const;
};

/// Computes y = W x, spread over the team; x `[cols]`, y `[rows]`.
void multiply(const Matrix& matrix, const float* x, Team& team, float* y);

}  // namespace keyhole::tools
