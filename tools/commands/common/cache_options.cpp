#include "tools/commands/common/cache_options.h"

#include "tools/commands/common/options.h"
#include "tools/commands/common/setting_options.h"
#include "tools/terminal/cli.h"
#include "tools/terminal/errors.h"

namespace keyhole::tools {

void add_cache_options(CLI::App& command, CacheFlags& flags) {
  command.add_option("--sink", flags.sink, setting(kSessionSettings, "sink").help)
      ->capture_default_str();
  command.add_option("--window", flags.window, setting(kSessionSettings, "window").help)
      ->capture_default_str();
  command
      .add_option("--threads", flags.threads,
                  "Worker threads; 0: one per core, two fewer with a GPU")
      ->capture_default_str();
  command
      .add_option("--kv-dtype", flags.kv_dtype,
                  "How K and V are stored: f16, bf16, f32, or auto: as the model's weights are")
      ->check(CLI::IsMember({"auto", "f16", "bf16", "f32"}))
      ->capture_default_str();
  add_kv_host_option(command, flags.kv_host);
  command
      .add_option("--cache-device", flags.cache_device,
                  "Where sink and window lie: host, cuda, or auto: where the model runs")
      ->check(CLI::IsMember({"auto", "host", "cuda"}))
      ->capture_default_str();
  command
      .add_option(
          "--dense-layers", flags.dense_layers,
          "Layers that always attend exactly, e.g. 0,1; those with a sliding window are not "
          "counted")
      ->delimiter(',')
      ->type_name("L,...");
  command
      .add_option("--classifiers", flags.classifiers,
                  "Trained partitions and query classifiers for saap, written by train-saap")
      ->type_name("FILE");
  command
      .add_option(
          "--budgets", flags.budgets,
          "Index and budget of each head, written by calibrate; --index, --attend, --tail and "
          "--target are those of what it does not name")
      ->type_name("FILE");
  command
      .add_option("--calibration", flags.calibration,
                  "A trace of this model, written by record, to which --index oscar2 fits its "
                  "rotations; best of another text")
      ->type_name("FILE");
  add_session_settings(command, flags.settings);
}

void name_prefill_budgets(ModelOptions& model, const CacheFlags& flags) {
  if (model.prefill != "budgets") return;
  if (flags.budgets.empty()) {
    throw UsageError("--prefill budgets: needed: --budgets FILE, or --prefill budgets:FILE");
  }
  model.prefill = "budgets:" + flags.budgets;
}

void set_kv_dtype(CacheFlags& flags, const LlamaConfig& model) {
  if (flags.kv_dtype != "auto") return;
  flags.kv_dtype = dtype_name(kv_dtype_of(model));
}

}  // namespace keyhole::tools
