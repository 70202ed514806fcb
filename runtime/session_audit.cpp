// What audits make of a session's steps, and what it tells of them.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <exception>

#include "runtime/session.h"

namespace keyhole::runtime {
namespace {

uint32_t widened(uint32_t top_k, uint32_t factor) {
  return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{top_k} * factor, kMaxTokens));
}

/// Asks for `factor` times as much: keys, rest of mass, error.
void widen(SearchParams& search, uint32_t factor) {
  const auto f = static_cast<float>(factor);
  search.k = widened(search.k, factor);
  search.min_weight /= f;
  if (search.tail.tree == nullptr) return;
  index::ReadGoal& goal = search.tail.goal;
  const auto rows = static_cast<uint32_t>(search.tail.tree->count());
  goal.error /= f;
  if (goal.mass > 0.0F) goal.mass = 1.0F - (1.0F - goal.mass) / f;
  goal.min_rows = std::min(widened(goal.min_rows, factor), rows);
  goal.max_rows = std::min(widened(goal.max_rows, factor), rows);
}

}  // namespace

uint32_t Session::widened_top_k(size_t head) const {
  const uint32_t factor = auditor_ == nullptr ? 1 : auditor_->schedule().reaches()[head].factor;
  return widened(heads_[head].params.budget.top_k, factor);
}

void Session::begin_audits(uint32_t layer) {
  AuditSchedule& schedule = auditor_->schedule();
  const uint64_t step = schedule.begin_step(layer);
  if (schedule.action() != KEYHOLE_AUDIT_REPORT) act_on_audits(layer, step);
  for (uint32_t h = 0; h < engine_->model().kv_heads; ++h) {
    HeadWork& work = step_.work(h);
    const AuditSchedule::Reach& reach = schedule.reach(layer, h);
    // Without a search there is nothing to widen: everything is attended, or nothing shall be.
    if (work.index != nullptr && reach.exact) {
      work.index = nullptr;
      work.exact_begin = 0;
    } else if (work.index != nullptr) {
      widen(work.search, reach.factor);
    }
    if (!schedule.chosen(layer, h, step)) continue;
    const Budget& budget = head(layer, h).params.budget;
    work.record = &auditor_->record(layer, h, step, budget.top_k, params_.audit_bound_of(budget),
                                    work.index != nullptr);
  }
}

void Session::act_on_audits(uint32_t layer, uint64_t step) {
  auditor_->finish_due(layer, step);
  bool wider = false;
  for (uint32_t h = 0; h < engine_->model().kv_heads; ++h) {
    if (!auditor_->schedule().act(layer, h, step)) continue;
    auditor_->count_action(layer, h);
    report_action(layer, h);
    wider = wider || !auditor_->schedule().reach(layer, h).exact;
  }
  if (!wider) return;
  try {
    make_room(false);
  } catch (const std::exception& e) {
    engine_->log()(KEYHOLE_LOG_WARNING,
                   "layer " + std::to_string(layer) + ": a wider search has no room: " + e.what());
  }
}

void Session::report_action(uint32_t layer, uint32_t kv_head) {
  audit_actions_ += 1;
  if (!std::has_single_bit(audit_actions_)) return;
  const AuditSchedule::Reach& reach = auditor_->schedule().reach(layer, kv_head);
  char now[48] = "attends everything exactly";
  if (!reach.exact) std::snprintf(now, sizeof now, "reads %u times its budget", reach.factor);
  char text[200];
  std::snprintf(text, sizeof text,
                "layer %u, KV head %u: an audit has found an output error above %g, so the head %s "
                "from now on (%llu such actions so far)",
                layer, kv_head,
                static_cast<double>(params_.audit_bound_of(head(layer, kv_head).params.budget)),
                now, static_cast<unsigned long long>(audit_actions_));
  engine_->log()(KEYHOLE_LOG_WARNING, text);
}

keyhole_audit Session::audit(uint32_t layer, uint32_t kv_head) {
  const std::vector<size_t> named = named_heads(layer, kv_head);
  if (auditor_ == nullptr) return AuditFigures().summary();
  auditor_->finish();
  AuditFigures sum;
  for (const size_t i : named) sum.merge(auditor_->figures()[i]);
  return sum.summary();
}

void Session::reset_statistics() {
  totals_ = {};
  if (stream_ != nullptr) stream_->reset_statistics();
  if (auditor_ == nullptr) return;
  auditor_->finish();
  auditor_->reset_figures();
}

}  // namespace keyhole::runtime
