// What a session computes its steps on the host with: a step for one token, one for several, and the pass of a batch;
// and the memory that searches in its indexes need.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/audit/session_audits.h"
#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/code_placement.h"
#include "runtime/session/host_memory.h"
#include "runtime/step/common_pass.h"
#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

class HostSteps {
 public:
  /// All that it is given outlives it. Of params the mode counts, which may change between steps.
  HostSteps(const Engine& engine, const SessionParams& params, Sequence& sequence,
            const IndexKeeper& keeper, const SessionAudits& audits, CodePlacement& codes,
            HostMemory& memory);
  HostSteps(const HostSteps&) = delete;
  HostSteps& operator=(const HostSteps&) = delete;

  /// Answers one token.
  [[nodiscard]] DecodeStep& one() { return one_; }
  /// Answers several tokens of the layer as one group; null: its tokens are answered one by one, because they may not
  /// be searched for together, or there is no memory for it.
  [[nodiscard]] DecodeStep* joint(uint32_t layer);

  /// Reserves memory for searches in the indexes that there are, after codes have been placed anew; `anew`: even where
  /// it seems to suffice. Throws Error and std::bad_alloc; searches have what they had then.
  void reserve(bool anew);
  /// Logs that there is no memory where reserve(false) throws; heads without the capacity for a search are attended
  /// exactly.
  void try_to_reserve(uint32_t layer, const char* for_what);
  /// What searches will take once there is a first index; 0 after that.
  [[nodiscard]] uint64_t first_search_bytes() const;

  /// Whether share_pass() has been called before, and its memory is still here.
  [[nodiscard]] bool has_common_pass() const { return common_pass_ != nullptr; }
  /// Does what planned steps of several sessions have in common, see CommonPass::run(). Where memory is lacking each
  /// step does all by itself.
  void share_pass(uint32_t layer, std::span<DecodeStep* const> steps,
                  const CommonPass::CommonRows& common_rows);

  /// Host memory of the steps, as it was when count_bytes() was last called: workers write to it during a step. From
  /// any thread.
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  /// No step is under way.
  void count_bytes() {
    bytes_ = one_.bytes() + (joint_ == nullptr ? 0 : joint_->bytes()) +
             (common_pass_ == nullptr ? 0 : common_pass_->bytes());
  }

 private:
  const Engine* engine_;
  const SessionParams* params_;
  Sequence* sequence_;
  const IndexKeeper* keeper_;
  const SessionAudits* audits_;
  CodePlacement* codes_;
  HostMemory* memory_;
  DecodeStep one_;
  std::unique_ptr<DecodeStep> joint_;  ///< null: there was no use for it yet
  /// For a batch, one of whose members has it; null: there was no use for it yet.
  std::unique_ptr<CommonPass> common_pass_;
  mutable uint64_t promised_search_bytes_ = 0;  ///< see first_search_bytes()
  std::atomic<uint64_t> bytes_;
};

}  // namespace keyhole::runtime
