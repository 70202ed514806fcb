// The question of one KV head in one step: whose queries, over which rows, with which logits and kernels. Every stage
// of the step (search, attention, tail) takes this one object.
#pragma once

#include <span>

#include "cpu/attention.h"
#include "cpu/row_access.h"
#include "index/index.h"

namespace keyhole::runtime {

struct GroupQuery {
  const cpu::Kernels* kernels = nullptr;
  KvView kv;                       ///< all offloaded rows of the KV head
  const float* queries = nullptr;  ///< `[group, dim]` fp32
  uint32_t group = 0;              ///< query heads
  LogitParams logits;
  uint32_t position = index::kUnknownPosition;  ///< token position of the queries

  [[nodiscard]] uint32_t dim() const { return kv.keys.dim; }
  /// Bytes of a key, which are those of a value.
  [[nodiscard]] size_t row_bytes() const { return dim() * dtype_size(kv.keys.dtype); }

  /// Writes the state of some rows, which are distinct.
  void attend(std::span<const uint32_t> rows, StateView out) const {
    cpu::attend_ids(*kernels, kv, rows, queries, group, logits, out);
  }
  /// Writes the state of rows [begin, begin + n).
  void attend_range(size_t begin, size_t n, StateView out) const {
    cpu::attend_range(*kernels, {kv.keys.slice(begin, n), kv.values.slice(begin, n)}, queries,
                      group, logits, out);
  }
  /// Writes the state of some rows from their inner products, scores[h * stride + i] of rows[i], so that only values
  /// are read. Returns false where scores have overflowed; attend() gives the state then.
  [[nodiscard]] bool attend_scored(std::span<const uint32_t> rows, const float* scores,
                                   size_t stride, StateView out) const {
    return cpu::attend_scored(*kernels, kv.values, rows, scores, stride, group, logits, out);
  }
  /// Writes scores[h * stride + i] = queries[h] . key rows[i].
  void score(std::span<const uint32_t> rows, float* scores, size_t stride) const {
    cpu::score_rows(*kernels, kv.keys, queries, group, rows.data(), rows.size(), scores, stride);
  }
};

/// The most parts of the search of one KV head.
inline constexpr uint32_t kMaxParts = 16;

/// A share of one search: part `number` of `count`, see index::SearchArgs.
struct SearchPart {
  uint32_t number = 0;
  uint32_t count = 1;
};

}  // namespace keyhole::runtime
