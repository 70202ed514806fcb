#include "runtime/audit/auditor.h"

#include <sched.h>

#include <algorithm>
#include <string>

namespace keyhole::runtime {
namespace {

// Size of the ring: in every layer step all heads may be audited, and half of the ring is always the step's.
size_t ring_size(const ModelShape& m) {
  return std::max<size_t>(16, size_t{2} * m.largest().kv_heads);
}

/// Components of the states of a group.
size_t group_numbers(const ModelShape& m) {
  return m.most([](const LayerShape& s) { return size_t{s.group()} * s.head_dim; });
}

}  // namespace

Auditor::Auditor(const Engine& engine, size_t capacity, uint32_t top_k, AuditSchedule schedule)
    : engine_(&engine),
      heads_(engine.model().head_numbers()),
      capacity_(capacity),
      top_k_(top_k),
      schedule_(std::move(schedule)) {
  const ModelShape& m = engine.model();
  figures_.resize(heads_.count());
  const uint32_t group = m.largest_group();
  const size_t numbers = group_numbers(m);
  const auto make_slot = [&] { return std::make_unique<Slot>(group, numbers, capacity); };
  for (size_t i = 0; i < ring_size(m); ++i) slots_.push_back(make_slot());
  spare_ = make_slot();
  for (uint32_t i = 0; i < engine.pool().threads() + 1; ++i) {
    truths_.push_back(std::make_unique<AuditTruth>(group, numbers));
    truths_.back()->prepare(top_k, capacity);
  }
  own_.reserve(slots_.size());
}

Auditor::~Auditor() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (running_ != nullptr) running_->cancelled.store(true, std::memory_order_relaxed);
  }
  work_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Auditor::reserve(uint32_t top_k) {
  if (top_k <= top_k_) return;
  finish();
  wait_for_thread();
  for (const auto& truth : truths_) truth->prepare(top_k, capacity_);
  top_k_ = top_k;
}

HeadRecord& Auditor::record(uint32_t layer, uint32_t kv_head, uint64_t step, uint32_t top_k,
                            float bound, bool searched) {
  // Completes all at once, because the pool works on many as long as on one.
  if (begun_ - taken_in_ == slots_.size()) complete(submitted_by_step_, true);
  Slot& s = slot(begun_++);
  s.state = Slot::State::waiting;
  s.waited_for = false;
  s.cancelled.store(false, std::memory_order_relaxed);
  HeadRecord& r = s.record;
  const LayerShape shape = engine_->model().of(layer);
  r.set_shape(shape.group(), shape.head_dim);
  r.layer = layer;
  r.kv_head = kv_head;
  r.step = step;
  r.top_k = top_k;
  r.bound = bound;
  r.factor = schedule_.widening(layer, kv_head).factor;
  r.epoch = schedule_.widening(layer, kv_head).epoch;
  r.searched = searched;
  r.knows_rows = true;
  return r;
}

void Auditor::submit() {
  if (begun_ == submitted_by_step_) return;
  submitted_by_step_ = begun_;
  {
    const std::lock_guard lock(mutex_);
    submitted_ = begun_;
    if (!thread_.joinable() && !no_thread_) {
      try {
        thread_ = std::thread([this] { work(); });
      } catch (const std::exception& e) {
        no_thread_ = true;
        engine_->log()(KEYHOLE_LOG_WARNING,
                       std::string("audits will be made in steps, not beside them: ") + e.what());
      }
    }
  }
  work_.notify_one();
}

void Auditor::finish() { complete(submitted_by_step_, false); }

void Auditor::finish_due(uint32_t layer, uint64_t step) {
  for (uint64_t i = submitted_by_step_; i > taken_in_; --i) {
    const HeadRecord& r = slot(i - 1).record;
    if (r.layer == layer && r.step + AuditSchedule::kLag <= step) return complete(i, true);
  }
}

void Auditor::finish_reading(uint32_t layer, size_t rows) {
  for (uint64_t i = submitted_by_step_; i > taken_in_; --i) {
    const HeadRecord& r = slot(i - 1).record;
    if (r.layer != layer || r.kv.keys.tokens <= rows) continue;
    complete(i, false);
    break;
  }
  wait_for_thread();
}

void Auditor::wait_for_thread() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] {
    return running_ == nullptr || !running_->cancelled.load(std::memory_order_relaxed);
  });
}

void Auditor::complete(uint64_t end, bool waiting) {
  if (end <= taken_in_) return;
  own_.clear();
  std::unique_ptr<Slot>* taken_away = nullptr;
  {
    const std::lock_guard lock(mutex_);
    next_ = std::max(next_, end);
    for (uint64_t i = taken_in_; i < end; ++i) {
      Slot& s = slot(i);
      if (s.state == Slot::State::done) continue;
      if (&s == running_) {
        s.cancelled.store(true, std::memory_order_relaxed);
        taken_away = &slots_[i % slots_.size()];
      }
      s.state = Slot::State::taken;
      own_.push_back(&s);
    }
  }
  engine_->pool().run(static_cast<uint32_t>(own_.size()), [&](uint32_t i, uint32_t worker) {
    Slot& s = *own_[i];
    s.waited_for = waiting;
    (void)truths_[worker]->compute(s.record, engine_->kernels(),
                                   engine_->model().logits_of(s.record.layer), never_, s.result);
  });
  for (; taken_in_ < end; ++taken_in_) take_in(slot(taken_in_));
  if (taken_away == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (running_ == taken_away->get()) std::swap(*taken_away, spare_);
}

void Auditor::take_in(const Slot& s) {
  const HeadRecord& r = s.record;
  AuditFigures& figures = figures_[heads_.at(r.layer, r.kv_head)];
  float worst = 0.0F;
  for (uint32_t h = 0; h < r.group; ++h) {
    figures.add(s.result, h, r.estimated_missing(h), r.bound);
    worst = std::max(worst, s.result.error[h]);
  }
  figures.add_seconds(s.result.seconds);
  if (s.waited_for) figures.add_wait();
  if (r.searched && worst > r.bound) {
    schedule_.found_over_bound(r.layer, r.kv_head, r.step, r.factor, r.epoch);
  }
}

void Auditor::work() {
  // Refused by some systems: then it is a thread like others.
  const sched_param no_priority{};
  (void)sched_setscheduler(0, SCHED_IDLE, &no_priority);
  AuditTruth& truth = *truths_.back();
  std::unique_lock lock(mutex_);
  while (!stop_) {
    while (next_ < submitted_ && slot(next_).state != Slot::State::waiting) ++next_;
    if (next_ >= submitted_) {
      work_.wait(lock);
      continue;
    }
    Slot& s = slot(next_++);
    s.state = Slot::State::taken;
    running_ = &s;
    lock.unlock();
    AuditResult result{};
    (void)truth.compute(s.record, engine_->kernels(), engine_->model().logits_of(s.record.layer),
                        s.cancelled, result);
    lock.lock();
    if (!s.cancelled.load(std::memory_order_relaxed)) {
      s.result = result;
      s.state = Slot::State::done;
    }
    running_ = nullptr;
    progress_.notify_one();
  }
}

size_t Auditor::bytes() const {
  size_t bytes = figures_.size() * sizeof(AuditFigures);
  for (const auto& s : slots_) bytes += sizeof(Slot) + s->record.bytes();
  bytes += sizeof(Slot) + spare_->record.bytes();
  const ModelShape& m = engine_->model();
  return bytes +
         truths_.size() * AuditTruth::bytes(m.largest_group(), group_numbers(m), top_k_, capacity_);
}

size_t Auditor::estimate_bytes(const ModelShape& m, uint32_t threads, uint32_t top_k,
                               size_t capacity) {
  const uint32_t group = m.largest_group();
  const size_t numbers = group_numbers(m);
  const size_t record = (3 * numbers + size_t{3} * group) * sizeof(float) + capacity / 8 + 64;
  return m.head_numbers().count() * sizeof(AuditFigures) +
         (ring_size(m) + 1) * (sizeof(Slot) + record) +
         (size_t{threads} + 1) * AuditTruth::bytes(group, numbers, top_k, capacity);
}

}  // namespace keyhole::runtime
