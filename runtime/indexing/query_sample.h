// A bounded sample of the prefill's queries for one KV head: evenly spread over the prompt, all
// heads of the group in turn. It guides index types that learn from queries.
#pragma once

#include <span>
#include <vector>

#include "cpu/shared.h"
#include "cpu/types.h"
#include "index/index.h"

namespace keyhole::runtime {

/// Keeps queries at token positions that are multiples of a stride, one query head each. When it is full the stride
/// doubles and every other entry goes, so that what is kept depends on the positions seen and not on how they were
/// cut into chunks. Copies share what they hold until one of them takes more.
class QuerySample {
 public:
  QuerySample(uint32_t capacity, uint32_t group, uint32_t dim)
      : capacity_(capacity), group_(group), dim_(dim) {}

  /// The head of the group whose query at `position` is wanted, or -1 if the position is not sampled. Positions must
  /// not fall (except after truncate()).
  [[nodiscard]] int wanted_head(uint32_t position) const;

  /// Takes the query `[dim]` fp32 of that head. An allocation that fails leaves the sample unchanged, except for
  /// entries that would have gone anyway.
  void add(uint32_t position, const float* query);

  /// Forgets all queries at `position` and later.
  void truncate(uint32_t position) noexcept;

  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] index::TrainingQueries view() const;
  [[nodiscard]] size_t bytes() const { return kept_ ? kept_->bytes() : 0; }
  /// The part of bytes() that a copy counts, see cpu/shared.h.
  [[nodiscard]] size_t bytes_of_others() const { return cpu::bytes_of_others(kept_); }

  [[nodiscard]] std::span<const uint32_t> positions() const {
    if (!kept_) return {};
    return {kept_->positions.data(), size_};
  }
  [[nodiscard]] std::span<const float> rows() const {
    if (!kept_) return {};
    return {kept_->rows.data(), size_ * dim_};
  }
  [[nodiscard]] uint32_t stride() const { return stride_; }
  /// Whether a sample can have this stride: a power of two up to 2^30.
  [[nodiscard]] static bool is_stride(uint32_t stride) {
    return stride != 0 && stride <= (1U << 30U) && (stride & (stride - 1)) == 0;
  }
  /// What is left of `from` when the tokens [first, first + count) are gone and those behind have moved up: its
  /// queries, those behind by way of turn(row). Their positions are multiples of a stride that count allows, which may
  /// be smaller. Throws std::bad_alloc, and then nothing has changed.
  template <class Turn>
  void take_moved(const QuerySample& from, uint32_t first, uint32_t count, const Turn& turn) {
    std::vector<uint32_t> kept;
    std::vector<float> queries;
    uint32_t stride = from.stride_;
    for (size_t i = 0; i < from.size_; ++i) {
      const uint32_t at = from.positions()[i];
      if (at >= first && at < uint64_t{first} + count) continue;
      const bool moves = at >= first;
      kept.push_back(moves ? at - count : at);
      const float* const row = from.rows().data() + i * dim_;
      queries.insert(queries.end(), row, row + dim_);
      if (!moves) continue;
      while (kept.back() % stride != 0) stride /= 2;
      turn(queries.data() + queries.size() - dim_);
    }
    if (kept.empty()) {
      truncate(0);
    } else {
      restore(stride, std::move(kept), std::move(queries));
    }
  }
  /// Puts a saved sample back. The caller has checked sizes, stride, and that positions rise in multiples of it.
  void restore(uint32_t stride, std::vector<uint32_t> positions, std::vector<float> rows);

 private:
  struct Kept {
    std::vector<uint32_t> positions;
    std::vector<float> rows;  ///< `[positions, dim]`

    [[nodiscard]] size_t bytes() const {
      return rows.capacity() * sizeof(float) + positions.capacity() * sizeof(uint32_t);
    }
  };
  /// The entries, for this object alone to change.
  [[nodiscard]] Kept& own();
  void thin();

  uint32_t capacity_, group_, dim_;
  uint32_t stride_ = 1;
  size_t size_ = 0;         ///< the first entries of kept_, which are its own
  cpu::Shared<Kept> kept_;  ///< none: nothing
};

}  // namespace keyhole::runtime
