// Caches of ways that have a format (tools/caches/): by the format's name alone, or by a calibration.
#pragma once

#include <memory>
#include <span>

#include "tools/caches/aging_format.h"
#include "tools/commands/common/attend_spec.h"
#include "tools/commands/common/cache_options.h"

namespace keyhole::tools {

/// Makes such caches for one model, one after the other. What oscar2 is fitted to is read once, for the first of them.
class RoundedCacheMaker {
 public:
  /// Makes an empty cache for a spec that has a format: K and V pass through it and are attended exactly, from fp32, so
  /// that nothing but the format rounds them. Not audited. oscar2 is fitted to the trace flags.calibration, which must
  /// be of the model flags.model and have all layers without a sliding window, with training queries: that shows
  /// progress and takes some seconds. `model` and the calibration are the same in every call. Throws UsageError for a
  /// model whose heads the format does not fit, and for a trace that is missing or another model's; what
  /// Trace::open() throws.
  [[nodiscard]] KeyholeCache make(const LlamaConfig& model, const CacheFlags& flags,
                                  uint32_t max_tokens, const AttendSpec& spec);

 private:
  std::shared_ptr<const AgingFormat> calibrated_;
};

/// Throws UsageError where flags name a calibration, and none of the ways is fitted to one.
void check_calibration_has_use(const CacheFlags& flags, std::span<const AttendSpec> specs);

}  // namespace keyhole::tools
