// Many new tokens of a layer by a pattern of prompts, with tensors in host memory: blocks of all tokens that there are,
// sink, offloaded rows as they lie, window and new ones, are chosen and attended by the host.
#pragma once

#include <cstdint>

#include "cpu/block_attention.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/extend_args.h"
#include "runtime/session/extend_patterns.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/host_steps.h"
#include "runtime/session/prompt_memory.h"
#include "runtime/session/step_totals.h"
#include "runtime/step/new_tokens.h"

namespace keyhole::runtime {

class HostPattern {
 public:
  /// All that it is given outlives it.
  HostPattern(const Engine& engine, Sequence& sequence, ExtendPatterns& patterns,
              PromptMemory& prompts, const HostMemory& memory, HostSteps& steps, StepTotals& totals)
      : engine_(&engine),
        sequence_(&sequence),
        patterns_(&patterns),
        prompts_(&prompts),
        memory_(&memory),
        steps_(&steps),
        totals_(&totals) {}

  /// Writes the answers of an extend that ExtendPatterns::apply_to(); `fresh` has its K and V as they will be stored.
  /// The new tokens are not appended. Throws Error(out_of_memory | not_finite).
  void attend(uint32_t layer, const ExtendArgs& args, const NewTokens& fresh);

 private:
  /// K, or V, of all tokens of a layer that does not slide, where they lie on the host.
  [[nodiscard]] cpu::RowRuns rows_before(uint32_t layer, bool values);

  const Engine* engine_;
  Sequence* sequence_;
  ExtendPatterns* patterns_;
  PromptMemory* prompts_;
  const HostMemory* memory_;
  HostSteps* steps_;
  StepTotals* totals_;
};

}  // namespace keyhole::runtime
