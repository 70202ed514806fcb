// Audits of a session's steps on the host: a record for each head that is audited, begun with the step and handed over
// with its answer.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/audit/session_audits.h"
#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/resident_truth.h"
#include "runtime/session/host_steps.h"

namespace keyhole::runtime {

class StepAudits {
 public:
  /// All that it is given outlives it.
  StepAudits(const Engine& engine, Sequence& sequence, const IndexKeeper& keeper,
             SessionAudits& audits, HostSteps& steps);

  [[nodiscard]] bool on() const { return audits_->on(); }
  /// HostSteps::one() is about to answer a token of the layer, and its work is prepared. Searches may become wider.
  /// What it throws has left no record open.
  void begin(uint32_t layer);
  /// The step has an answer. by_codes: the device has attended its offloaded tokens by their codes.
  void end(uint32_t layer, bool by_codes);
  /// The step has failed: its records are void.
  void discard() { audits_->discard(); }

 private:
  /// Records of a step over codes on the device know neither its answer nor the resident tokens yet.
  void complete_coded(uint32_t layer);

  const Engine* engine_;
  const IndexKeeper* keeper_;
  SessionAudits* audits_;
  HostSteps* steps_;
  std::unique_ptr<ResidentTruth> resident_truth_;  ///< null: the device has no streams
};

}  // namespace keyhole::runtime
