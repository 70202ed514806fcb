// Audits of steps on a stream, whose answers the device leaves in memory of the host (gpu::StreamSteps::answer()).
//
//   submit   count(): whether a KV head of the step is audited; then the step keeps its answer
//   serve    open(): a record for each of these heads, with the queries and the offloaded rows of that moment
//            take_resident(): the exact state of the resident tokens by the host's copy, before the next step changes
//            it
//   later    close(): the answer; then the records may be audited, beside the decoding
//
// The answer of a step is here when a later one is served, as a stream comes to a step after it has done all before: so
// the records of one step are open at most, and nothing waits for the device.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "gpu/step.h"
#include "runtime/audit/session_audits.h"
#include "runtime/engine/engine.h"
#include "runtime/kv/resident_truth.h"
#include "runtime/stream/stream_server.h"

namespace keyhole::runtime {

/// count() from the thread that submits steps, all else from the one that serves them, or while none is under way.
/// Nothing throws but the constructor.
class StreamAudits {
 public:
  /// All that it is given outlives it.
  StreamAudits(const Engine& engine, SessionAudits& audits, gpu::StreamSteps& steps);

  [[nodiscard]] bool on() const { return audits_->on(); }
  /// Counts a step of the layer; the number under which it is audited, if it is.
  [[nodiscard]] std::optional<uint64_t> count(uint32_t layer) { return audits_->count(layer); }

  /// The step is served now. add() follows for each of its KV heads.
  void open(const StreamStep& step);
  /// The record of a head with this budget; null: this head of the step is not audited.
  [[nodiscard]] HeadRecord* add(uint32_t kv_head, const Budget& budget);
  /// Of a head whose offloaded rows the device attends by their codes: its queries `[group, head_dim]` and rows.
  void take_coded(uint32_t kv_head, const float* queries, const KvView& rows);
  /// The host's copy holds the resident tokens of the step, and the host's part of it is over.
  void take_resident();

  /// Takes the answers of the open records. is_over: the step has ended, so that an answer which is not here will not
  /// come, and its records are dropped; else they stay open.
  void close(bool is_over);
  /// The step has failed.
  void drop();

 private:
  const Engine* engine_;
  SessionAudits* audits_;
  gpu::StreamSteps* steps_;
  /// `[kv_heads]` of the layer, and as many as the largest has. Null: not audited.
  std::vector<HeadRecord*> records_;
  bool is_open_ = false;
  StreamStep step_;  ///< of the open records
  ResidentTruth resident_;
};

}  // namespace keyhole::runtime
