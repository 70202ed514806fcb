// Steps on the host: the driver of all of them, and keyhole_session_attend with tensors in host memory, which appends
// its token first. Tokens that are appended when their answers are known: host_extension.h.
#pragma once

#include <cstdint>

#include "runtime/kv/sequence.h"
#include "runtime/session/host_steps.h"
#include "runtime/session/prompt_memory.h"
#include "runtime/session/session_indexing.h"
#include "runtime/session/session_tokens.h"
#include "runtime/session/step_audits.h"
#include "runtime/session/step_totals.h"
#include "runtime/session/step_work.h"
#include "runtime/session/stream_stepper.h"
#include "runtime/step/new_tokens.h"

namespace keyhole::runtime {

/// Parts of a session that its steps on the host use; all of them outlive who is given them.
struct HostParts {
  const Engine& engine;
  Sequence& sequence;
  SessionTokens& tokens;
  SessionIndexing& indexing;
  StreamStepper& stream;
  CodePlacement& codes;
  PromptMemory& prompts;
  HostSteps& steps;
  const StepWork& work;
  StepAudits& audits;
  StepTotals& totals;
};

/// Some tokens of a call, `[count]` from `first` on, that one step answers.
struct StepTokens {
  uint32_t layer = 0;
  uint32_t first = 0, count = 1;
  uint32_t position = 0;  ///< of the first, in the sequence
};

class HostStepper {
 public:
  explicit HostStepper(const HostParts& parts) : parts_(parts) {}
  HostStepper(const HostStepper&) = delete;
  HostStepper& operator=(const HostStepper&) = delete;

  // One step: prepare(), launch(), finish(), each of which throws Error, with no audit open then. The step,
  // HostSteps::one() or joint(), is used by nobody else meanwhile.
  /// Gives the step the tokens' queries, of a tensor `[tokens, q_heads, head_dim]`, and says what each KV head does.
  void prepare(DecodeStep& step, const StepTokens& tokens, const TensorView& q);
  /// Hands it to the pool. fresh: the new tokens that it attends beside those that the sequence holds; null: none. They
  /// stay valid until finish().
  void launch(DecodeStep& step, const StepTokens& tokens, const NewTokens* fresh);
  /// Waits for it, and writes the tokens' answers to their places in out and lse (null: not wanted).
  void finish(DecodeStep& step, const StepTokens& tokens, const TensorOut& out, float* lse);

  // keyhole_session_attend_begin and keyhole_session_attend_end, with tensors in host memory. Where they throw, the
  // token is not there.
  void begin(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v);
  void end(const TensorOut& out, float* lse);
  /// Ends the step without a result, before the session goes.
  void abandon() noexcept;
  [[nodiscard]] bool in_step() const { return in_step_; }
  /// The layer of the step that is under way.
  [[nodiscard]] uint32_t layer() const { return begun_.layer; }

 private:
  HostParts parts_;
  // The step between begin() and end().
  bool in_step_ = false;
  StepTokens begun_;
  bool appended_ = false;
  Stopwatch watch_;
  double append_seconds_ = 0.0;
};

}  // namespace keyhole::runtime
