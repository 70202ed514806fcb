// The record that a step leaves of one KV head, so that it can be audited when there is time: the queries, the
// output, and which rows were attended. The rows themselves stay in the offload store.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/memory.h"
#include "cpu/tensor_view.h"
#include "cpu/types.h"

namespace keyhole::runtime {

/// A set of rows, one bit each. Address space for all possible rows is reserved once; memory is taken as far as rows
/// go: 16 KiB at 128k tokens.
class RowSet {
 public:
  explicit RowSet(size_t capacity) : words_((capacity + 63) / 64 * sizeof(uint64_t), false) {}

  /// Adds rows below the capacity. Several threads may add at once.
  void add(std::span<const uint32_t> rows) {
    for (const uint32_t row : rows) {
      std::atomic_ref(word(row)).fetch_or(bit(row), std::memory_order_relaxed);
    }
  }
  [[nodiscard]] bool contains(uint32_t row) const { return (word(row) & bit(row)) != 0; }
  /// Forgets all rows below `rows`.
  void clear(size_t rows) {
    if (rows == 0) return;
    std::fill_n(reinterpret_cast<uint64_t*>(words_.data()), (rows + 63) / 64, 0);
    touched_ = std::max(touched_, (rows + 63) / 64);
  }
  [[nodiscard]] size_t bytes() const { return touched_ * sizeof(uint64_t); }

 private:
  static uint64_t bit(uint32_t row) { return uint64_t{1} << (row % 64); }
  [[nodiscard]] uint64_t& word(uint32_t row) const {
    return reinterpret_cast<uint64_t*>(words_.data())[row / 64];
  }

  cpu::ReservedBuffer words_;
  size_t touched_ = 0;
};

/// The record of one KV head of one step. Lives in a slot of the Auditor and is used again and again.
struct HeadRecord {
  /// Memory for groups of up to `heads` query heads, whose queries have up to `numbers` components together, and for
  /// `capacity` rows.
  HeadRecord(size_t heads, size_t numbers, size_t capacity)
      : queries(numbers),
        resident_o(numbers),
        o(numbers),
        resident_lse(heads),
        read_lse(heads),
        unread_lse(heads),
        attended(capacity) {}

  /// Sets the shape of the step that it is used for next; takes no memory.
  void set_shape(uint32_t heads, uint32_t dim) {
    group = heads;
    for (auto* v : {&queries, &resident_o, &o}) v->resize(size_t{heads} * dim);
    for (auto* v : {&resident_lse, &read_lse, &unread_lse}) v->resize(heads);
  }

  uint32_t group = 0;

  // Filled in, before the step starts, by the caller that wants the audit.
  uint32_t layer = 0, kv_head = 0;
  uint64_t step = 0;      ///< of the layer
  uint32_t top_k = 0;     ///< recall is of so many keys
  uint32_t factor = 1;    ///< by which the head's budget was widened
  uint32_t epoch = 0;     ///< of the budget, see AuditSchedule
  float bound = 0.0F;     ///< an output error above it is too much
  bool searched = false;  ///< through an index, so that widening can help
  bool knows_rows =
      true;  ///< which rows were attended exactly; false: codes on a device stood for some of them

  // Filled in by the step.
  KvView kv;                        ///< the offloaded rows of that moment
  uint32_t exact_begin = 0;         ///< rows from here on were attended, beside those in `attended`
  std::vector<float> queries;       ///< `[group, dim]`
  std::vector<float> resident_o;    ///< `[group, dim]` state of sink and window
  std::vector<float> o;             ///< `[group, dim]` the step's output
  std::vector<float> resident_lse;  ///< `[group]`
  std::vector<float> read_lse;  ///< `[group]` of all that was read, resident and pending included
  std::vector<float>
      unread_lse;   ///< `[group]` of all else, by the tail's estimate; -inf: no estimate
  RowSet attended;  ///< indexed rows

  /// Sets the resident state to `state`, that of tokens which are not among the rows.
  void set_resident(StateView state) {
    std::copy_n(state.o, resident_o.size(), resident_o.data());
    std::copy_n(state.lse, group, resident_lse.data());
  }

  /// The estimated share of the mass that was not read.
  [[nodiscard]] float estimated_missing(uint32_t head) const {
    if (unread_lse[head] == kMinusInf) return 0.0F;
    return 1.0F / (1.0F + std::exp(read_lse[head] - unread_lse[head]));
  }
  [[nodiscard]] bool was_attended(uint32_t row) const {
    return row >= exact_begin || attended.contains(row);
  }
  [[nodiscard]] size_t bytes() const {
    return 3 * (queries.capacity() + read_lse.capacity()) * sizeof(float) + attended.bytes();
  }
};

}  // namespace keyhole::runtime
