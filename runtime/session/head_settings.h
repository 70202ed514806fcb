// Settings that a session changes while it lives: index, mode, what is attended, budgets of heads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/audit/session_audits.h"
#include "runtime/indexing/index_keeper.h"
#include "runtime/session/code_placement.h"
#include "runtime/session/host_steps.h"
#include "runtime/session/stream_stepper.h"

namespace keyhole::runtime {

/// All calls have the strong guarantee, and need a session without a step under way.
class HeadSettings {
 public:
  /// All that it is given outlives it. params: the session's, which it changes.
  HeadSettings(const Engine& engine, SessionParams& params, IndexKeeper& keeper,
               SessionAudits& audits, CodePlacement& codes, HostSteps& steps, StreamStepper& stream)
      : engine_(&engine),
        params_(&params),
        keeper_(&keeper),
        audits_(&audits),
        codes_(&codes),
        steps_(&steps),
        stream_(&stream) {}

  /// See keyhole_session_set_index.
  void set_index(const std::string& wanted);
  /// top_k: 1..max_tokens, or 0 to keep it.
  void set_mode(keyhole_mode mode, uint32_t top_k);
  void set_attend(keyhole_attend_mode attend, float min_weight);
  /// See keyhole_session_set_budget; layer and kv_head may be KEYHOLE_ALL.
  void set_budget(uint32_t layer, uint32_t kv_head, const Budget& budget);
  [[nodiscard]] Budget budget(uint32_t layer, uint32_t kv_head) const;
  /// Numbers of the heads that a layer and KV head, each perhaps KEYHOLE_ALL, name; throws Error(invalid_argument).
  [[nodiscard]] std::vector<size_t> named_heads(uint32_t layer, uint32_t kv_head) const;

 private:
  /// What set_mode(), set_attend() and set_budget() change.
  struct Settings {
    keyhole_mode mode;
    Budget common;
    std::vector<Budget> heads;  ///< by their HeadNumbers
  };
  /// set_index() of a type, or of "auto".
  void set_type(const std::string& wanted);
  [[nodiscard]] Settings settings() const;
  /// Runs check(budget) for each of these budgets, which are by their HeadNumbers; what it throws names the head.
  template <class Check>
  void check_heads(const std::vector<Budget>& budgets, const Check& check) const;
  /// Throws Error(invalid_argument) where a budget is none that a session may have: it could be saved, but not loaded.
  void check_budgets(const Settings& settings) const;
  /// `anew`: searches need memory of another shape.
  void change(const Settings& settings, bool anew);

  const Engine* engine_;
  SessionParams* params_;
  IndexKeeper* keeper_;
  SessionAudits* audits_;
  CodePlacement* codes_;
  HostSteps* steps_;
  StreamStepper* stream_;
};

}  // namespace keyhole::runtime
