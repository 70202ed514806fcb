#include "tools/rivals/stored_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "runtime/files/element.h"

namespace keyhole::tools {

StoredMatrix::StoredMatrix(ElementType type, const float* numbers, size_t rows, size_t dim)
    : type_(type), dim_(dim), row_bytes_(dim * (type == ElementType::f32 ? 4 : 2)) {
  switch (type) {
    case ElementType::f32: numbers_.emplace<0>(rows * dim); break;
    case ElementType::f16: numbers_.emplace<1>(rows * dim); break;
    case ElementType::bf16: numbers_.emplace<2>(rows * dim); break;
    default: throw std::runtime_error("rows are stored as f32, f16 or bf16");
  }
  std::visit(
      [&](auto& stored) {
        elements_from_f32(type, {numbers, rows * dim}, std::as_writable_bytes(std::span(stored)));
      },
      numbers_);
}

uint64_t StoredMatrix::bytes() const {
  return std::visit([](const auto& stored) { return uint64_t{stored.size()} * sizeof(stored[0]); },
                    numbers_);
}

void StoredMatrix::read(size_t row, float* out) const {
  if (const auto* plain = std::get_if<0>(&numbers_)) {
    std::copy_n(plain->data() + row * dim_, dim_, out);
  } else if (const auto* half = std::get_if<1>(&numbers_)) {
    to_f32(half->data() + row * dim_, dim_, out);
  } else {
    to_f32(std::get<2>(numbers_).data() + row * dim_, dim_, out);
  }
}

void StoredMatrix::products(const float* x, size_t first, size_t last, float* out) const {
  std::visit(
      [&](const auto& stored) {
        matrix_vector(stored.data() + first * dim_, dim_, x, 0, last - first, out);
      },
      numbers_);
}

void RowAttention::attend(const float* queries, size_t heads, std::span<const uint32_t> rows,
                          std::span<const float> log_weights, float* o, float* lse) {
  const size_t n = rows.size();
  std::fill_n(o, heads * dim_, 0.0F);
  if (n == 0) {
    std::fill_n(lse, heads, -std::numeric_limits<float>::infinity());
    return;
  }
  logits_.resize(heads * n);
  products_.resize(heads);
  row_.resize(dim_);
  // A key is loaded once for all heads.
  for (size_t i = 0; i < n; ++i) {
    stored_.keys.read(rows[i], row_.data());
    matrix_vector(queries, dim_, row_.data(), 0, heads, products_.data());
    for (size_t j = 0; j < heads; ++j) logits_[j * n + i] = rule_.scale * products_[j];
  }
  if (rule_.softcap > 0) soft_cap(rule_.softcap, heads * n, logits_.data());
  for (size_t j = 0; j < heads; ++j) {
    float* logits = logits_.data() + j * n;
    for (size_t i = 0; i < log_weights.size(); ++i) logits[i] += log_weights[i];
    const float top = *std::max_element(logits, logits + n);
    for (size_t i = 0; i < n; ++i) logits[i] -= top;
    exp_in_place(logits, n);
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += logits[i];
    lse[j] = static_cast<float>(top + std::log(sum));
    scale(static_cast<float>(1 / sum), n, logits);
  }
  for (size_t i = 0; i < n; ++i) {
    stored_.values.read(rows[i], row_.data());
    for (size_t j = 0; j < heads; ++j) {
      add_rows(row_.data(), dim_, &logits_[j * n + i], 1, o + j * dim_);
    }
  }
}

}  // namespace keyhole::tools
