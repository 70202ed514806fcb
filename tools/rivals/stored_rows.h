// Keys and values of the offloaded tokens as a session stores them, and exact attention over some of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "runtime/files/safetensors.h"
#include "tools/llama/vector_math.h"

namespace keyhole::tools {

/// Rows of one matrix `[rows, d]` in f32, f16 or bf16. Any number of threads may read.
class StoredMatrix {
 public:
  StoredMatrix() = default;
  /// Rounds `rows` rows of d numbers to the type. Throws std::runtime_error for any other type.
  StoredMatrix(ElementType type, const float* numbers, size_t rows, size_t dim);

  [[nodiscard]] ElementType type() const { return type_; }
  [[nodiscard]] size_t rows() const { return dim_ == 0 ? 0 : bytes() / row_bytes_; }
  [[nodiscard]] size_t row_bytes() const { return row_bytes_; }
  [[nodiscard]] uint64_t bytes() const;

  /// Writes row `row` to out `[d]`, exactly as it is stored.
  void read(size_t row, float* out) const;
  /// Writes out[i] = row (first + i) . x for the rows [first, last).
  void products(const float* x, size_t first, size_t last, float* out) const;

 private:
  std::variant<std::vector<float>, std::vector<Float16>, std::vector<BFloat16>> numbers_;
  ElementType type_ = ElementType::f32;
  size_t dim_ = 0, row_bytes_ = 0;
};

struct StoredRows {
  StoredMatrix keys, values;  ///< `[rows, d]` both
};

/// The rule by which logits follow from inner products, as in TraceInfo.
struct LogitRule {
  float scale = 1;
  float softcap = 0;  ///< > 0: capped
};

/// Attention of some query heads to some rows. Owns its buffers; one thread at a time.
class RowAttention {
 public:
  RowAttention(const StoredRows& stored, size_t dim, LogitRule rule)
      : stored_(stored), dim_(dim), rule_(rule) {}

  /// Writes o `[heads, d]` = sum of w_i exp(logit_i) v_i / sum of w_i exp(logit_i), and lse `[heads]` = log of the
  /// latter sum; 0 and -inf without rows. log_weights `[rows]` for all heads, or empty: w = 1.
  void attend(const float* queries, size_t heads, std::span<const uint32_t> rows,
              std::span<const float> log_weights, float* o, float* lse);

 private:
  const StoredRows& stored_;
  const size_t dim_;
  const LogitRule rule_;
  std::vector<float> logits_, row_, products_;
};

}  // namespace keyhole::tools
