#include "tools/commands/common/rounded_cache.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tools/caches/oscar.h"
#include "tools/caches/oscar_fit.h"
#include "tools/io/trace.h"
#include "tools/terminal/errors.h"
#include "tools/terminal/interrupt.h"
#include "tools/terminal/progress.h"

namespace keyhole::tools {
namespace {

/// Throws UsageError unless the trace is of all full layers of the model.
void check_calibration(const TraceInfo& info, const LlamaConfig& model, const CacheFlags& flags) {
  const std::string file = "--calibration " + flags.calibration;
  if (info.model != flags.model) {
    throw UsageError(file + " is of the model '" + info.model + "'; needed: a trace of '" +
                     flags.model + "'");
  }
  const auto check_same = [&file](const char* what, uint32_t seen, uint32_t needed) {
    if (seen == needed) return;
    throw UsageError(file + ": " + what + " is " + std::to_string(seen) +
                     "; needed: " + std::to_string(needed) + ", as the model has");
  };
  check_same("q_heads", info.q_heads, model.q_heads);
  check_same("kv_heads", info.kv_heads, model.kv_heads);
  check_same("head_dim", info.head_dim, model.head_dim);
  check_same("the number of layers", static_cast<uint32_t>(info.layers.size()),
             model.full_layers());
}

OscarHead fit_head(const Trace& trace, const TraceHead& head, const std::string& file) {
  if (!head.values || !head.training_queries || trace.training_positions().empty()) {
    throw UsageError("--calibration " + file +
                     " has no training queries; needed: a trace that record wrote with --training");
  }
  const std::vector<float> keys = head.keys.to_f32(), values = head.values->to_f32();
  const std::vector<float> queries = head.training_queries->to_f32();
  const TraceInfo& info = trace.info();
  return fit_oscar({.keys = keys.data(),
                    .values = values.data(),
                    .rows = info.tokens,
                    .dim = info.head_dim,
                    .queries = queries.data(),
                    .group = info.group(),
                    .positions = trace.training_positions(),
                    .scale = info.scale,
                    .softcap = info.softcap});
}

std::shared_ptr<const AgingFormat> make_calibrated(const LlamaConfig& model,
                                                   const CacheFlags& flags) {
  if (flags.calibration.empty()) {
    throw UsageError(
        "--index oscar2: --calibration is missing; needed: a trace of this model, e.g. of keyhole "
        "record --model DIR --prompt TEXT --out FILE");
  }
  const Trace trace = Trace::open(flags.calibration);
  check_calibration(trace.info(), model, flags);
  Progress bar("rotations of oscar2");
  std::vector<OscarHead> heads;
  for (const TraceHead& head : trace.heads()) {
    throw_if_interrupted();
    heads.push_back(fit_head(trace, head, flags.calibration));
    bar.update(static_cast<double>(heads.size()) / static_cast<double>(trace.heads().size()));
  }
  return make_oscar(std::move(heads), model.kv_heads, model.head_dim);
}

KeyholeCacheOptions rounded_options(const CacheFlags& flags, uint32_t max_tokens,
                                    const AttendSpec& spec) {
  KeyholeCacheOptions options;
  options.max_tokens = max_tokens;
  options.sink = flags.sink;
  options.window = flags.window;
  options.threads = flags.threads;
  options.ranks = cache_ranks(flags.parallel, flags.device, RanksOn::host);
  options.device = flags.device;
  options.mode = spec.mode();
  options.kv_dtype = KEYHOLE_F32;
  return options;
}

}  // namespace

KeyholeCache RoundedCacheMaker::make(const LlamaConfig& model, const CacheFlags& flags,
                                     uint32_t max_tokens, const AttendSpec& spec) {
  const KvFormat format = spec.format().value();
  KeyholeCacheOptions options = rounded_options(flags, max_tokens, spec);
  if (!ages(format)) {
    if (model.head_dim % kKvFormatBlock != 0) {
      throw UsageError("--index " + spec.text + ": head_dim is " + std::to_string(model.head_dim) +
                       "; allowed: multiples of 32, the numbers that share a scale");
    }
    options.kv_format = format;
    return {model, options};
  }
  try {
    options.aging = make_aging_format(format, model.head_dim);
  } catch (const std::invalid_argument& e) {
    throw UsageError("--index " + spec.text + ": " + e.what());
  }
  if (!options.aging) {
    if (!calibrated_) calibrated_ = make_calibrated(model, flags);
    options.aging = calibrated_;
  }
  return {model, options};
}

void check_calibration_has_use(const CacheFlags& flags, std::span<const AttendSpec> specs) {
  const bool used = std::any_of(specs.begin(), specs.end(), [](const AttendSpec& spec) {
    return spec.format() == KvFormat::oscar2;
  });
  if (used || flags.calibration.empty()) return;
  throw UsageError("--calibration " + flags.calibration +
                   ": no --index is fitted to it; allowed with --index oscar2");
}

}  // namespace keyhole::tools
