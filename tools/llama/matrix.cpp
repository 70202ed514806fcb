#include "tools/llama/matrix.h"

#include <algorithm>
#include <cstring>

#include "tools/llama/vector_math.h"

namespace keyhole::tools {
namespace {

/// body(rows of that type, [first, last) of the part, first row of the matrix) for each part that the range touches.
template <class Body>
void for_parts(const Matrix& matrix, size_t first, size_t last, const Body& body) {
  size_t start = 0;
  for (const MatrixPart& part : matrix.parts) {
    const size_t begin = std::max(first, start);
    const size_t end = std::min(last, start + part.rows);
    if (begin < end) {
      switch (part.type) {
        case ElementType::bf16:
          body(reinterpret_cast<const BFloat16*>(part.data), begin - start, end - start, start);
          break;
        case ElementType::f16:
          body(reinterpret_cast<const Float16*>(part.data), begin - start, end - start, start);
          break;
        default: body(reinterpret_cast<const float*>(part.data), begin - start, end - start, start);
      }
    }
    start += part.rows;
  }
}

void to_f32(const float* x, size_t n, float* out) { std::memcpy(out, x, n * sizeof(float)); }

}  // namespace

size_t Matrix::bytes() const {
  size_t total = 0;
  for (const MatrixPart& part : parts) total += part.rows * cols * element_size(part.type);
  return total;
}

void Matrix::rows_to_f32(size_t first, size_t last, float* out) const {
  for_parts(*this, first, last, [&](const auto* data, size_t begin, size_t end, size_t start) {
    to_f32(data + begin * cols, (end - begin) * cols, out + (start + begin - first) * cols);
  });
}

void multiply(const Matrix& matrix, const float* x, Team& team, float* y) {
  // An item of 64 Ki weights takes about 10 us, several times what handing it to a thread costs.
  constexpr size_t kItemWeights = size_t{64} << 10;
  const size_t rows = std::max<size_t>(4, kItemWeights / matrix.cols / 4 * 4);
  team.for_each((matrix.rows + rows - 1) / rows, [&](size_t item, unsigned) {
    const size_t first = item * rows;
    for_parts(matrix, first, std::min(first + rows, matrix.rows),
              [&](const auto* data, size_t begin, size_t end, size_t start) {
                matrix_vector(data, matrix.cols, x, begin, end, y + start);
              });
  });
}

}  // namespace keyhole::tools
