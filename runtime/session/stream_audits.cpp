#include "runtime/session/stream_audits.h"

#include <algorithm>

#include "cpu/attention_state.h"
#include "runtime/step/recording.h"

namespace keyhole::runtime {

StreamAudits::StreamAudits(const Engine& engine, SessionAudits& audits, gpu::StreamSteps& steps)
    : engine_(&engine),
      audits_(&audits),
      steps_(&steps),
      records_(engine.model().largest().kv_heads),
      resident_(engine, steps) {}

void StreamAudits::open(const StreamStep& step) {
  is_open_ = true;
  step_ = step;
  std::fill(records_.begin(), records_.end(), nullptr);
}

HeadRecord* StreamAudits::add(uint32_t kv_head, const Budget& budget) {
  records_[kv_head] = audits_->record(step_.layer, kv_head, step_.number, budget);
  return records_[kv_head];
}

void StreamAudits::take_coded(uint32_t kv_head, const float* queries, const KvView& rows) {
  HeadRecord& record = *records_[kv_head];
  record.knows_rows = false;
  const GroupQuery query{.kernels = &engine_->kernels(),
                         .kv = rows,
                         .queries = queries,
                         .group = record.group,
                         .logits = engine_->model().logits_of(step_.layer)};
  begin_record(record, query, 0);
}

void StreamAudits::take_resident() {
  for (uint32_t h = 0; h < records_.size(); ++h) {
    HeadRecord* record = records_[h];
    if (record == nullptr) continue;
    record->set_resident(resident_.state(step_.layer, h, record->queries.data()));
    // What the host's part has read has the sinks.
    for (uint32_t g = 0; g < record->group && record->knows_rows; ++g) {
      record->read_lse[g] =
          static_cast<float>(cpu::add_logs<double>(record->read_lse[g], record->resident_lse[g]));
    }
    add_sinks(*record, engine_->model().sinks_of(step_.layer, h));
  }
}

void StreamAudits::close(bool is_over) {
  if (!is_open_) return;
  for (uint32_t h = 0; h < records_.size(); ++h) {
    HeadRecord* record = records_[h];
    if (record == nullptr) continue;
    StateView answer;
    if (!steps_->answer(step_.layer, h, step_.sequence, answer)) {
      if (is_over) drop();
      return;
    }
    std::copy_n(answer.o, record->o.size(), record->o.data());
    if (!record->knows_rows) std::copy_n(answer.lse, record->group, record->read_lse.data());
  }
  is_open_ = false;
  audits_->submit();
}

void StreamAudits::drop() {
  if (!is_open_) return;
  is_open_ = false;
  audits_->discard();
}

}  // namespace keyhole::runtime
