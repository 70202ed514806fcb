// One step of a rival: its search, then attention over what it found.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tools/rivals/rival.h"

namespace keyhole::tools {

/// The buffers and the call of one group search with attention. One thread at a time; once warm, nothing allocates
/// except the rival itself.
class RivalStep {
 public:
  /// `rival` is built over `stored`; both outlive the object. Rows of Rival::own_rows() are attended in place of
  /// `stored`. k: keys that a search is asked for per head.
  RivalStep(Rival& rival, const StoredRows& stored, const RivalShape& shape, LogitRule rule,
            size_t k);

  /// Runs a step with queries `[g, d]`.
  void run(const float* queries);

  /// Rows that head j attended; valid until the next run.
  [[nodiscard]] std::span<const uint32_t> attended_by(size_t head) const {
    return answer.own_rows ? std::span<const uint32_t>(answer.heads[head].rows) : distinct;
  }

  std::vector<float> o, lse;       // `[g, d]`, `[g]`: the state over the offloaded keys
  std::vector<uint32_t> distinct;  // rows that any head attended
  RivalAnswer answer;
  uint64_t keys_scored = 0;  // (key, query head) pairs
  uint64_t bytes_read = 0;   // by search and attention

 private:
  Rival& rival_;
  const StoredRows& stored_;
  const double row_bytes_;
  const RivalShape shape_;
  const size_t k_;
  RowAttention attention_;
  std::vector<uint32_t> seen_;  // `[rows]` the run in which a row was last met
  uint32_t run_ = 0;
};

}  // namespace keyhole::tools
