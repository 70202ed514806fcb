// Several new tokens of a layer with tensors in device memory (keyhole_session_extend), on the session's stream, by the
// fastest of:
//
//   steps    a few tokens at a time, in the order of the stream
//   codes    attention of all codes at once, for which only rows that weigh cross the bus
//            (gpu::BlockedAttention::attend_codes()); where codes cannot tell enough, by blocks
//   blocks   attention of all rows, for which the offloaded rows cross the bus once for all tokens
//   lists    attention of the blocks of rows that a pattern chooses (device_pattern.cpp); or by the pattern `codes` of
//            blocks of codes
//
// Tokens of a sliding layer are always attended by steps.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>

#include "gpu/blocked.h"
#include "gpu/coded_rows.h"
#include "gpu/step_group.h"
#include "runtime/kv/sequence.h"
#include "runtime/session/device_blocks.h"
#include "runtime/session/device_prompts.h"
#include "runtime/session/extend_args.h"
#include "runtime/session/extend_patterns.h"
#include "runtime/session/step_totals.h"

namespace keyhole::runtime {

/// Parts of a session that extends on its device use; all of them outlive who is given them.
struct DeviceParts {
  const Engine& engine;
  const SessionParams& params;
  Sequence& sequence;
  SessionTokens& tokens;
  ExtendedTokens& extended;
  CodePlacement& codes;
  StreamStepper& stream;
  PromptMemory& prompt_memory;
  DevicePrompts& prompts;
  DeviceBlocks& blocks;
  ExtendPatterns& patterns;
  StepTotals& totals;
};

class DeviceExtender {
 public:
  explicit DeviceExtender(const DeviceParts& parts) : parts_(parts) {}
  DeviceExtender(const DeviceExtender&) = delete;
  DeviceExtender& operator=(const DeviceExtender&) = delete;

  /// Throws Error; outside of captures the tokens are those of before then.
  void extend(uint32_t layer, const ExtendArgs& args);

  // For a batch, see device_batch.h.
  /// Whether one step over codes on the device answers the new tokens. Waits for the host's part of the steps before.
  [[nodiscard]] bool takes_one_step(uint32_t layer, const ExtendArgs& args);
  /// Waits for what the step waits for, without enqueuing it.
  void prepare_step(uint32_t layer, const ExtendArgs& args);
  /// Enqueues the step or adds it to the group: after prepare_step().
  void extend_in_group(uint32_t layer, const ExtendArgs& args, gpu::StepGroup& group) {
    extend_by_steps(layer, args, &group);
  }
  /// It was added and could not be launched: throws `error`, with the session as after an extend that failed.
  [[noreturn]] void fail_in_group(uint32_t layer, const std::exception_ptr& error);
  [[nodiscard]] StreamRunner& runner() { return parts_.stream.runner(); }

 private:
  /// Whether the device attends all rows, or lists of them, at once; not in a capture.
  [[nodiscard]] bool attends_at_once(uint32_t layer) const;
  /// Microseconds that the offloaded rows of a layer take, estimated: for each of n new tokens by steps, and for all of
  /// them in full at once.
  struct TurnTimes {
    double token_by_step, in_full;
  };
  /// Where it attends_at_once().
  [[nodiscard]] TurnTimes times_of(uint32_t layer, uint32_t n) const;
  /// Whether n new tokens are attended by blocks, or a few at a time by steps.
  [[nodiscard]] bool attends_blocked(uint32_t layer, uint32_t n, bool masked) const;
  /// Attends all rows by blocks, and appends the tokens, whose queries guide the index where they are a prompt's. No
  /// step is under way.
  /// codes: what is attended in place of the rows that it is of; without blocks: nothing.
  void extend_blocked(uint32_t layer, const ExtendArgs& args, bool is_prompt,
                      const gpu::CodedRows& codes);
  /// The codes that new tokens attend at once; without blocks: they attend none so. chosen: of how many blocks of them
  /// each tile of queries is to attend, see ExtendPatterns::coded_blocks(); 0: where codes are the fastest, all of
  /// them.
  [[nodiscard]] gpu::CodedRows codes_of_turn(uint32_t layer, const ExtendArgs& args,
                                             uint32_t chosen);
  /// Counts what n tokens behind `before` have attended, of `rows` offloaded rows, the first of which `codes` are of.
  /// end: what has come of these.
  void count_attended(uint32_t layer, size_t n, uint32_t before, uint32_t rows,
                      const gpu::CodedRows& codes, const gpu::CodedAttention& end);
  /// Attends codes; refused: their rows are to be attended in place of them. meanwhile: see
  /// BlockedAttention::attend_codes().
  [[nodiscard]] gpu::CodedAttention attend_codes(gpu::BlockedAttention& blocked,
                                                 const gpu::CodedRows& codes, gpu::Stream stream,
                                                 const std::function<void()>& meanwhile);
  /// Enqueues a step for each token of a sliding layer.
  void extend_window(uint32_t layer, const ExtendArgs& args);
  /// What new token i of a sliding layer sees by the mask. Throws Error(invalid_argument) where the ring is too short
  /// for it.
  [[nodiscard]] gpu::SeenDrafts drafts_seen(uint32_t layer, const uint64_t* mask, uint32_t i) const;
  /// group: where the last step may wait for those of other sessions, see StreamRunner::enqueue().
  void extend_by_steps(uint32_t layer, const ExtendArgs& args, gpu::StepGroup* group = nullptr);
  /// Enqueues a step of the tokens from `first` on; returns how many it took.
  [[nodiscard]] uint32_t enqueue_some(uint32_t layer, const ExtendArgs& args, uint32_t first,
                                      gpu::StepGroup* group);

  // device_pattern.cpp
  /// Whether the tokens are attended by the pattern that was set: by lists, or all rows where it is dense.
  [[nodiscard]] bool attends_by_pattern(uint32_t layer, const ExtendArgs& args) const;
  /// Whether such tokens are attended by lists, given how many tokens are there before them.
  [[nodiscard]] bool attends_by_lists(uint32_t layer, const ExtendArgs& args) const;
  /// Attends by lists, and appends the tokens. No step is under way.
  void extend_listed(uint32_t layer, const ExtendArgs& args);

  DeviceParts parts_;
};

}  // namespace keyhole::runtime
