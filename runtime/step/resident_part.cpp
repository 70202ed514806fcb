#include "runtime/step/resident_part.h"

#include <algorithm>
#include <array>
#include <thread>

#include "cpu/attention.h"

namespace keyhole::runtime {

ResidentPart::ResidentPart(uint32_t kv_heads, size_t states, size_t numbers)
    : states_(states, numbers),
      fresh_states_(states, numbers),
      kv_heads_(kv_heads),
      tasks_(std::make_unique<Task[]>(kv_heads_)) {}

void ResidentPart::begin(gpu::Resident& resident, uint32_t layer, const float* q, uint32_t group,
                         gpu::Codes* codes, const NewTokens* fresh, const float* sinks) {
  resident_ = &resident;
  layer_ = layer;
  q_ = q;
  fresh_ = fresh;
  sinks_ = codes == nullptr ? sinks : nullptr;
  group_ = group;
  states_.set_shape(group, dim_);
  fresh_states_.set_shape(group, dim_);
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    tasks_[h].taken.store(false, std::memory_order_relaxed);
    tasks_[h].done.store(false, std::memory_order_relaxed);
  }
  const bool lies_here = resident.contiguous_rows(layer, 0).keys.data != nullptr;
  // A device is not asked about a layer without any token.
  const bool has_none =
      codes == nullptr && resident.sink_count(layer) + resident.window_count(layer) == 0;
  has_begun_ = fresh == nullptr || !(lies_here || has_none);
  is_here_ = fresh != nullptr && (!has_begun_ || resident.host_tasks() != 0);
  if (has_begun_) resident.attend_begin(layer, q, codes);
}

void ResidentPart::begin_without(uint32_t group, const float* sinks) {
  resident_ = nullptr;
  fresh_ = nullptr;
  is_here_ = false;
  sinks_ = sinks;
  group_ = group;
  states_.set_shape(group, dim_);
  if (sinks == nullptr) return;
  const uint32_t heads = kv_heads_ * group_;
  std::fill_n(states_.all().o, size_t{heads} * dim_, 0.0F);
  std::copy_n(sinks, heads, states_.all().lse);
}

void ResidentPart::attend_here(uint32_t kv_head, StateView out) {
  if (has_begun_) {
    resident_->run_host_task(kv_head);
    const StateView state = resident_->host_state(kv_head);
    std::copy_n(state.o, size_t{group_} * dim_, out.o);
    std::copy_n(state.lse, group_, out.lse);
    return;
  }
  const KvView rows = resident_->contiguous_rows(layer_, kv_head);
  if (rows.keys.tokens == 0) return cpu::clear_state(out, group_, dim_);
  cpu::attend_range(*fresh_->kernels, rows, q_ + size_t{kv_head} * group_ * dim_, group_,
                    fresh_->logits, out);
}

void ResidentPart::attend_fresh(uint32_t kv_head) {
  const float* q = q_ + size_t{kv_head} * group_ * dim_;
  const StateView fresh = fresh_states_.slot(kv_head);
  fresh_->attend(kv_head, q, group_ / fresh_->asking, fresh);
  if (!is_here_) return;
  const StateView state = states_.slot(kv_head);
  attend_here(kv_head, state);
  const std::array<StateView, 2> both{state, fresh};
  cpu::merge_states(both, group_, dim_, state);
  add_sinks(kv_head, state);
}

void ResidentPart::add_sinks(uint32_t kv_head, StateView states) const {
  if (sinks_ == nullptr) return;
  const uint32_t asking = fresh_ == nullptr ? 1 : fresh_->asking;
  const uint32_t heads = group_ / asking;  // of the model's group
  for (uint32_t t = 0; t < asking; ++t) {
    const size_t at = size_t{t} * heads;
    cpu::add_sinks(sinks_ + size_t{kv_head} * heads, heads, dim_,
                   {states.o + at * dim_, states.lse + at});
  }
}

bool ResidentPart::run_untaken(uint32_t task, StepCost& cost) {
  if (tasks_[task].taken.exchange(true, std::memory_order_relaxed)) return false;
  const Stopwatch watch;
  if (fresh_ != nullptr) {
    attend_fresh(task);
  } else {
    resident_->run_host_task(task);
    add_sinks(task, resident_->host_state(task));
  }
  cost.resident_seconds += watch.seconds();
  tasks_[task].done.store(true, std::memory_order_release);
  return true;
}

void ResidentPart::run(uint32_t task, StepCost& cost) { (void)run_untaken(task, cost); }

StateView ResidentPart::state_now(uint32_t kv_head, StepCost& cost) {
  if (!is_there() && sinks_ != nullptr) return states_.slot(kv_head);
  if (tasks() == 0 || (fresh_ != nullptr && !is_here_)) return {};
  if (!run_untaken(kv_head, cost)) {
    // Another worker computes it, within some tens of microseconds.
    while (!tasks_[kv_head].done.load(std::memory_order_acquire)) std::this_thread::yield();
  }
  return is_here_ ? states_.slot(kv_head) : resident_->host_state(kv_head);
}

void ResidentPart::end() {
  if (is_here_) return;
  resident_->attend_end(states_.all());
  if (fresh_ != nullptr) {
    const std::array<StateView, 2> both{states_.all(), fresh_states_.all()};
    cpu::merge_states(both, kv_heads_ * group_, dim_, states_.all());
  }
  // Tasks of the host have added theirs. What the device has attended is of one token.
  if (sinks_ != nullptr && resident_->host_tasks() == 0) {
    cpu::add_sinks(sinks_, kv_heads_ * group_, dim_, states_.all());
  }
}

}  // namespace keyhole::runtime
