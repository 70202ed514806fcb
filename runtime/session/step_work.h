// What each KV head does in a step on the host: which of its offloaded rows are searched, read by their codes, or
// attended exactly. The step itself is step/decode_step.h.
#pragma once

#include <cstdint>

#include "runtime/indexing/index_keeper.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/code_placement.h"
#include "runtime/step/decode_step.h"

namespace keyhole::runtime {

class StepWork {
 public:
  /// All that it is given outlives it; of params the mode counts, which may change between steps.
  StepWork(const Engine& engine, const SessionParams& params, const Sequence& sequence,
           const IndexKeeper& keeper, const CodePlacement& codes)
      : engine_(&engine),
        params_(&params),
        sequence_(&sequence),
        keeper_(&keeper),
        codes_(&codes) {}

  /// Writes the work of the layer's heads into a step that answers `tokens` tokens, the first of which is at
  /// `position`.
  void prepare(DecodeStep& step, uint32_t layer, uint32_t position, uint32_t tokens) const;
  /// The first offloaded row that a step attends exactly, but for those of a block that has no codes yet.
  [[nodiscard]] size_t exact_from(uint32_t layer, uint32_t kv_head) const;

 private:
  void prepare_codes(DecodeStep& step, HeadWork& work, const HeadIndex& head, uint32_t position,
                     uint32_t tokens) const;

  const Engine* engine_;
  const SessionParams* params_;
  const Sequence* sequence_;
  const IndexKeeper* keeper_;
  const CodePlacement* codes_;
};

}  // namespace keyhole::runtime
