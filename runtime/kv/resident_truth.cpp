#include "runtime/kv/resident_truth.h"

#include <span>

#include "cpu/attention.h"
#include "cpu/attention_state.h"

namespace keyhole::runtime {

ResidentTruth::ResidentTruth(const Engine& engine, gpu::StreamSteps& steps)
    : engine_(&engine), steps_(&steps) {
  const ModelShape& m = engine.model();
  const size_t most = m.most([](const LayerShape& s) { return size_t{s.group()} * s.head_dim; });
  const auto size = [&](State& state) {
    state.o.resize(most);
    state.lse.resize(m.largest_group());
  };
  for (State& piece : pieces_) size(piece);
  size(merged_);
}

StateView ResidentTruth::state(uint32_t layer, uint32_t kv_head, const float* queries) {
  const LayerShape m = engine_->model().of(layer);
  const KvPieces rows = steps_->host_copy(layer).head(kv_head);
  std::array<StateView, 3> states;
  for (uint32_t i = 0; i < rows.count; ++i) {
    states[i] = pieces_[i].view();
    cpu::attend_range(engine_->kernels(), rows.pieces[i], queries, m.group(),
                      engine_->model().logits_of(layer), states[i]);
  }
  cpu::merge_states(std::span(states).first(rows.count), m.group(), m.head_dim, merged_.view());
  return merged_.view();
}

}  // namespace keyhole::runtime
