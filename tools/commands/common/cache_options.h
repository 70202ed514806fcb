// The options of commands that have a cache, Keyhole's session.
#pragma once

#include <keyhole/keyhole.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tools/commands/common/audit_report.h"
#include "tools/commands/common/cli_fwd.h"
#include "tools/commands/common/model_options.h"
#include "tools/commands/common/parallel.h"
#include "tools/llama/keyhole_cache.h"

namespace keyhole::tools {

/// The options `--sink`, `--window`, `--threads`, `--kv-dtype`, `--kv-host`, `--cache-device`, `--dense-layers`,
/// `--classifiers`, `--budgets`, `--calibration`, and one for each setting of a session that has none of these.
struct CacheFlags {
  uint32_t sink = static_cast<uint32_t>(setting(kSessionSettings, "sink").initial);
  uint32_t window = static_cast<uint32_t>(setting(kSessionSettings, "window").initial);
  uint32_t threads = 0;
  std::string kv_dtype = "auto";  ///< auto: set_kv_dtype() names it
  std::string kv_host = "same";
  std::vector<uint32_t> dense_layers;
  std::string classifiers;
  std::string budgets;
  std::string calibration;  ///< a trace of the model, for oscar2
  std::string model;        ///< no option: model_name(), of which a calibration must be
  std::string cache_device = "auto";
  keyhole_device device = KEYHOLE_DEVICE_HOST;  ///< no option: Runner::session_device()
  std::vector<SettingValue> settings;           ///< of all other rows of the table of settings
  AuditFlags audit;                             ///< of commands that have add_audit_options()
  ParallelFlags parallel;                       ///< of commands that have add_parallel_options()
};
void add_cache_options(CLI::App& command, CacheFlags& flags);
/// Puts "budgets:FILE" with the file of --budgets in place of --prefill budgets. Throws UsageError where there is no
/// file.
void name_prefill_budgets(ModelOptions& model, const CacheFlags& flags);
/// Puts the dtype of the model's K and V in place of `--kv-dtype auto`.
void set_kv_dtype(CacheFlags& flags, const LlamaConfig& model);

}  // namespace keyhole::tools
