// A bounded sample of the prefill's queries for one KV head: evenly spread over the prompt, all
// heads of the group in turn. It guides index types that learn from queries.
#pragma once

#include <vector>

#include "cpu/types.h"
#include "index/index.h"

namespace keyhole::runtime {

/// Keeps the token positions that are multiples of a stride, one query head each. When it is full
/// the stride doubles and every other entry goes: what is kept depends on the positions seen, not
/// on how they were cut into chunks.
class QuerySample {
 public:
  QuerySample(uint32_t capacity, uint32_t group, uint32_t dim)
      : capacity_(capacity), group_(group), dim_(dim) {}

  /// Head of the group whose query at `position` is wanted, or -1 if the position is not sampled.
  /// Positions must not fall (other than after truncate).
  [[nodiscard]] int wanted_head(uint32_t position) const;

  /// Takes the query `[dim]` fp32 of that head. An allocation that fails leaves the sample as it was, but for entries that
  /// would have gone anyway.
  void add(uint32_t position, const float* query);

  /// Forgets positions >= position.
  void truncate(uint32_t position);

  [[nodiscard]] size_t size() const { return positions_.size(); }
  [[nodiscard]] index::TrainingQueries view() const;
  [[nodiscard]] size_t bytes() const {
    return rows_.capacity() * sizeof(float) + positions_.capacity() * sizeof(uint32_t);
  }

  [[nodiscard]] const std::vector<uint32_t>& positions() const { return positions_; }
  [[nodiscard]] const std::vector<float>& rows() const { return rows_; }
  [[nodiscard]] uint32_t stride() const { return stride_; }
  /// Whether a sample can have this stride: a power of two up to 2^30.
  [[nodiscard]] static bool is_stride(uint32_t stride) {
    return stride != 0 && stride <= (1U << 30U) && (stride & (stride - 1)) == 0;
  }
  /// Puts a saved sample back; the caller has checked sizes, stride, and that positions rise in multiples of it.
  void restore(uint32_t stride, std::vector<uint32_t> positions, std::vector<float> rows);

 private:
  void thin();

  uint32_t capacity_, group_, dim_;
  uint32_t stride_ = 1;
  std::vector<uint32_t> positions_;
  std::vector<float> rows_;  ///< `[size, dim]`
};

}  // namespace keyhole::runtime
