#include "runtime/session/step_audits.h"

#include <algorithm>
#include <array>

#include "runtime/step/recording.h"

namespace keyhole::runtime {

StepAudits::StepAudits(const Engine& engine, Sequence& sequence, const IndexKeeper& keeper,
                       SessionAudits& audits, HostSteps& steps)
    : engine_(&engine), keeper_(&keeper), audits_(&audits), steps_(&steps) {
  gpu::StreamSteps* const stream_steps = sequence.resident().stream_steps();
  if (stream_steps == nullptr) return;
  resident_truth_ = std::make_unique<ResidentTruth>(engine, *stream_steps);
}

void StepAudits::begin(uint32_t layer) {
  if (!on()) return;
  const uint32_t kv_heads = engine_->model().of(layer).kv_heads;
  const auto budget = [&](uint32_t h) -> const Budget& {
    return keeper_->head(layer, h).params.budget;
  };
  try {
    audits_->begin_step(layer);
    bool wider = false;
    for (uint32_t h = 0; h < kv_heads; ++h) wider = audits_->act(layer, h, budget(h)) || wider;
    if (wider) steps_->try_to_reserve(layer, "there is no memory for a wider search");
    for (uint32_t h = 0; h < kv_heads; ++h) {
      audits_->record(layer, h, budget(h), steps_->one().work(h));
    }
  } catch (...) {
    discard();
    throw;
  }
}

void StepAudits::end(uint32_t layer, bool by_codes) {
  if (on() && by_codes) complete_coded(layer);
  audits_->submit();
}

void StepAudits::complete_coded(uint32_t layer) {
  const LayerShape m = engine_->model().of(layer);
  DecodeStep& step = steps_->one();
  for (uint32_t h = 0; h < m.kv_heads; ++h) {
    HeadRecord* record = step.work(h).record;
    if (record == nullptr) continue;
    // The state that the step took for the resident one is that of all tokens.
    record->knows_rows = false;
    const StateView resident = resident_truth_->state(layer, h, record->queries.data());
    const StateView fresh = step.fresh_state(h);
    if (fresh.o != nullptr) {
      const std::array<StateView, 2> both{resident, fresh};
      cpu::merge_states(both, m.group(), m.head_dim, resident);
    }
    record->set_resident(resident);
    add_sinks(*record, engine_->model().sinks_of(layer, h));
    std::copy_n(step.lse() + size_t{h} * m.group(), m.group(), record->read_lse.data());
  }
}

}  // namespace keyhole::runtime
