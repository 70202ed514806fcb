// One audit: a KV head of one step computed again from all rows, and compared with the step's result.
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
  /// Memory for groups of up to `group` query heads, whose queries have up to `numbers` components together.
  AuditTruth(uint32_t group, size_t numbers);

  /// Reserves memory for recall of `top_k` of `rows` keys, kMostPrepared at most, so that compute() does not. Beyond
  /// that, memory grows with the rows; where there is none, the audit has no recall.
  void prepare(uint32_t top_k, size_t rows);

  /// Computes the truth; reads every row once. Returns false, and no result, once `cancel` is set, which it notices
  /// within kRows rows, some tens of microseconds. The result depends on the record alone.
  [[nodiscard]] bool compute(const HeadRecord& record, const cpu::Kernels& kernels,
                             const LogitParams& logits, const std::atomic<bool>& cancel,
                             AuditResult& result);

  /// Bytes of an object after prepare() with these arguments.
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
  /// The true state in double: o as the sum of weights exp(logit - largest) times values, and the sum of the weights.
  std::vector<double> sum_o_, weight_, largest_;
  index::TopK best_;
};

}  // namespace keyhole::runtime
