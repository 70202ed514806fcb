// The reports of decode on an answer: text for people, JSON for programs.
#pragma once

#include <keyhole/keyhole.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/commands/common/gpu_memory.h"
#include "tools/commands/decode/check.h"
#include "tools/commands/decode/conversation.h"
#include "tools/commands/decode/options.h"
#include "tools/commands/decode/prompt.h"

namespace keyhole::tools {

/// The generated tokens and their cost.
struct DecodeRun {
  std::vector<uint32_t> tokens;
  std::string text;  ///< as shown; empty without a tokenizer
  StopReason stop = StopReason::none;
  std::string index;  ///< in effect: what "auto" became; empty for ways without one
  Conversation::Taken taken;
  TurnCost turn;  ///< with --turn
  double decode_seconds = 0.0;
  StepTimes times;
  keyhole_statistics statistics{};
  std::optional<keyhole_audit> audit;
  std::optional<CheckResult> check;
  std::optional<GpuMemoryPlan> memory;  ///< with --gpu-memory

  /// Steps per second, not tokens: the first token comes from the prefill.
  [[nodiscard]] double tokens_per_second() const {
    return decode_seconds > 0.0 ? static_cast<double>(times.steps) / decode_seconds : 0.0;
  }
};

/// The lines below an answer.
[[nodiscard]] std::string report_text(const DecodeOptions& options, const Runner& runner,
                                      const DecodeRun& run, const Prompt& prompt);
[[nodiscard]] nlohmann::ordered_json report_json(const DecodeOptions& options, const Runner& runner,
                                                 const DecodeRun& run, const Prompt& prompt,
                                                 bool has_text);

}  // namespace keyhole::tools
