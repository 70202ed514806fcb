// The plan of bench-step: what it measures.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tools/caches/kv_format.h"
#include "tools/commands/bench_step/head_turn.h"
#include "tools/commands/bench_step/step_data.h"
#include "tools/commands/bench_step/step_ranks.h"
#include "tools/commands/common/budget_choice.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// An index and what is attended of its searches.
struct StepRun {
  std::string index;
  std::string series;  ///< the --index or the run file's sweep that it comes from
  std::vector<BudgetChoice> budgets;
};

/// The whole plan, with everything filled in.
struct StepPlan {
  StepShape shape;
  uint64_t context = 0;
  uint32_t sink = 128, window = 512;
  uint32_t steps = 32, warmup = 8;
  uint32_t audit_steps = 8;  ///< 0: no figures of quality
  uint32_t training_queries = 4096;
  TurnKind turn = TurnKind::permute;
  uint64_t seed = 1;
  std::vector<StepRun> runs;
  keyhole_device device = KEYHOLE_DEVICE_AUTO;
  keyhole_signal signal = KEYHOLE_SIGNAL_AUTO;
  keyhole_kv_host kv_host = KEYHOLE_KV_HOST_SAME;
  std::vector<SettingValue> settings;  ///< of the sessions
  uint32_t device_ordinal = 0;
  uint32_t threads = 0;
  bool weights = false;
  bool blocking = false;  ///< tensors in host memory and a call that waits, also on a CUDA device
  bool graph = false;
  uint64_t device_cap = 0, host_cap = 0, pinned_cap = 0;  ///< bytes; 0: none
  bool compare_full = false, compare_resident = false, compare_pcie = false;
  std::vector<KvFormat> compare_formats;
  uint32_t busy = 0;  ///< threads that copy memory while steps are timed
  StepRanks
      ranks;  ///< among whom the model is shared; `threads`, `busy` and the caps are each rank's

  /// Number of tokens that are decoded after the context.
  [[nodiscard]] uint32_t tokens() const { return warmup + steps; }
  /// The part of `shape` that this process has.
  [[nodiscard]] StepShape own_shape() const { return ranks.share(shape); }
};

}  // namespace keyhole::tools
