#include "runtime/step/resident_part.h"

#include <thread>

namespace keyhole::runtime {

ResidentPart::ResidentPart(uint32_t q_heads, uint32_t group, uint32_t dim)
    : states_(q_heads, group, dim),
      kv_heads_(q_heads / group),
      tasks_(std::make_unique<Task[]>(kv_heads_)) {}

void ResidentPart::begin(gpu::Resident& resident, uint32_t layer, const float* q,
                         gpu::Codes* codes) {
  resident_ = &resident;
  for (uint32_t h = 0; h < kv_heads_; ++h) {
    tasks_[h].taken.store(false, std::memory_order_relaxed);
    tasks_[h].done.store(false, std::memory_order_relaxed);
  }
  resident.attend_begin(layer, q, codes);
}

bool ResidentPart::run_untaken(uint32_t task, StepCost& cost) {
  if (tasks_[task].taken.exchange(true, std::memory_order_relaxed)) return false;
  const Stopwatch watch;
  resident_->run_host_task(task);
  cost.resident_seconds += watch.seconds();
  tasks_[task].done.store(true, std::memory_order_release);
  return true;
}

void ResidentPart::run(uint32_t task, StepCost& cost) { (void)run_untaken(task, cost); }

StateView ResidentPart::state_now(uint32_t kv_head, StepCost& cost) {
  if (tasks() == 0) return {};
  if (!run_untaken(kv_head, cost)) {
    // Another worker computes it, within some tens of microseconds.
    while (!tasks_[kv_head].done.load(std::memory_order_acquire)) std::this_thread::yield();
  }
  return resident_->host_state(kv_head);
}

}  // namespace keyhole::runtime
