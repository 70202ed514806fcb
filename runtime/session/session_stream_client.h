// What steps on a stream ask of the session that they belong to (stream/stream_runner.h): counts, room, the host's part
// of a step, audits.
#pragma once

#include <cstdint>
#include <optional>

#include "runtime/session/code_placement.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/host_steps.h"
#include "runtime/session/session_indexing.h"
#include "runtime/session/step_totals.h"
#include "runtime/session/step_work.h"
#include "runtime/session/stream_audits.h"
#include "runtime/stream/stream_runner.h"

namespace keyhole::runtime {

/// Parts of a session that its steps on a stream use; all of them outlive the client.
struct StreamParts {
  const Engine& engine;
  const SessionParams& params;
  Sequence& sequence;
  const IndexKeeper& keeper;
  SessionAudits& audits;
  HostMemory& memory;
  StepTotals& totals;
  CodePlacement& codes;
  HostSteps& steps;
  const StepWork& work;
  SessionIndexing& indexing;
};

class SessionStreamClient final : public StreamClient {
 public:
  SessionStreamClient(const StreamParts& parts, gpu::StreamSteps& steps)
      : parts_(parts), steps_(&steps), audits_(parts.engine, parts.audits, steps) {}

  uint32_t tokens(uint32_t layer) const override { return parts_.sequence.tokens(layer); }
  ResidentCounts resident_counts(uint32_t layer) const override {
    return {parts_.sequence.sink(layer), parts_.sequence.window(layer)};
  }
  bool append_is_due(uint32_t layer) const override { return parts_.indexing.append_is_due(layer); }
  uint64_t host_bytes() const override { return parts_.memory.accounted(); }
  void advance_append(uint32_t layer) override { parts_.indexing.advance_append(layer); }
  uint32_t row_block() const override { return parts_.sequence.row_block(); }
  void codes_gone() override { parts_.codes.place(); }
  void flush(uint32_t layer) override;

  void prepare_work(uint32_t layer, uint32_t position) override {
    parts_.work.prepare(parts_.steps.one(), layer, position, 1);
  }
  void start_step(uint32_t layer, const float* q, ResultSink& sink) override {
    parts_.steps.one().start(layer, q, sink);
  }
  void finish_step() override {
    parts_.totals.add(parts_.steps.one().finish());
    parts_.steps.count_bytes();
  }
  void append_published(uint32_t layer, const gpu::Published& published, uint32_t tokens) override;

  bool has_audits() const override { return audits_.on(); }
  std::optional<uint64_t> count_step(uint32_t layer) override { return audits_.count(layer); }
  void begin_audit(const StreamStep& step, const gpu::Published& published) override;
  void end_served_audit() override { audits_.take_resident(); }
  void close_audit(bool is_over) override { audits_.close(is_over); }
  void drop_audit() override { audits_.drop(); }

 private:
  StreamParts parts_;
  gpu::StreamSteps* steps_;
  StreamAudits audits_;
};

}  // namespace keyhole::runtime
