// The audit itself: one KV head of one step computed again from all rows, and what the step made of it.
#pragma once

#include <atomic>
#include <vector>

#include "cpu/kernels.h"
#include "index/scan/topk.h"
#include "runtime/audit/audit_figures.h"
#include "runtime/step/audit_record.h"

namespace keyhole::runtime {

/// Memory and work of one auditing thread.
class AuditTruth {
 public:
  /// For groups of up to `group` query heads, whose queries have up to `numbers` components together.
  AuditTruth(uint32_t group, size_t numbers);

  /// Reserves memory for recall of `top_k` of `rows` keys, so that compute() does not; of as many as kMostPrepared.
  /// Above that, memory grows with the rows; where there is none, the audit has no recall.
  void prepare(uint32_t top_k, size_t rows);

  /// Reads every row once. False, and no result, once `cancel` is set: noticed within kRows rows, some tens of
  /// microseconds. The result depends on the record alone.
  [[nodiscard]] bool compute(const HeadRecord& record, const cpu::Kernels& kernels,
                             const LogitParams& logits, const std::atomic<bool>& cancel,
                             AuditResult& result);

  /// Bytes of one that is prepared so.
  [[nodiscard]] static size_t bytes(uint32_t group, size_t numbers, uint32_t top_k, size_t rows);

 private:
  /// Rows at a time: their scores stay in the first-level cache, their keys and values pass the second.
  static constexpr size_t kRows = 1024;
  static constexpr uint32_t kMostPrepared = 8192;

  void add_state(const float* o, const float* lse);

  uint32_t most_group_;
  uint32_t group_ = 0, dim_ = 0;            ///< of the record
  std::vector<float> scores_;               ///< `[group, kRows]`
  std::vector<float> chunk_o_, chunk_lse_;  ///< `[group, dim]`, `[group]`
  /// The true state in double: o as a sum of weights exp(logit - largest) times values, and the weights' sum.
  std::vector<double> sum_o_, weight_, largest_;
  index::TopK best_;
};

}  // namespace keyhole::runtime
