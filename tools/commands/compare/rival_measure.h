// Measures one rival over one recorded head: the figures of a row of compare.
#pragma once

#include <memory>

#include "tools/commands/common/head_measure.h"
#include "tools/commands/common/head_truth.h"
#include "tools/io/trace.h"
#include "tools/rivals/rival.h"
#include "tools/rivals/step.h"

namespace keyhole::tools {

/// A rival built over the offloaded keys of one head, and the rows that it attends.
class BuiltRival {
 public:
  /// Builds. `truth` must outlive the object. Throws UsageError where the spec cannot be built over these keys, and
  /// what the rival throws.
  BuiltRival(const RivalSpec& spec, const Trace& trace, const TraceHead& head,
             const HeadTruth& truth, keyhole_dtype kv_dtype, unsigned threads);

  /// Sets another spec that is built_alike().
  void set_spec(const RivalSpec& spec) { rival_->set_spec(spec); }

  /// Searches and attends with every used query: once for quality, which warms up, and once for latency. k: keys that
  /// the rival is asked for per head, if it is asked. The caller sets series, index, layer and kv_head. `answers`:
  /// takes the answers from which recall is counted; or null.
  [[nodiscard]] Measurement measure(const RivalSpec& spec, size_t k, bool rounds_keys,
                                    HeadAnswers* answers = nullptr);

 private:
  const HeadTruth& truth_;
  const keyhole_dtype kv_dtype_;
  RivalShape shape_;
  StoredRows stored_;
  std::unique_ptr<Rival> rival_;
  double build_seconds_ = 0;
};

/// The facts known of a head's data before it is read.
[[nodiscard]] RivalShape rival_shape(const Trace& trace, const TraceHead& head,
                                     const Offloaded& offloaded);

/// How a rival chose, for its rows: "topk:100", or "own" if it has a budget of its own.
[[nodiscard]] std::string rival_attend(const RivalSpec& spec, size_t k);

}  // namespace keyhole::tools
