#include "runtime/audit/session_audits.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <string>
#include <vector>

namespace keyhole::runtime {
namespace {

uint32_t widened(uint32_t keys, uint32_t factor) {
  return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{keys} * factor, kMaxTokens));
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

SessionAudits::SessionAudits(const Engine& engine, const SessionParams& params, uint32_t top_k)
    : engine_(&engine), params_(&params) {
  if (params.audit_share <= 0.0) return;
  const ModelShape& m = engine.model();
  auditor_ = std::make_unique<Auditor>(
      engine, params.max_tokens, top_k,
      AuditSchedule(m.head_numbers(), params.audit_share, params.audit_action));
  count_bytes();
}

float SessionAudits::bound_of(const Budget& budget) const {
  return params_->audit_bound_of(budget);
}

// ---- In a step ----------------------------------------------------------------------------------

void SessionAudits::begin_step(uint32_t layer) {
  if (!on()) return;
  step_ = auditor_->schedule().begin_step(layer);
  if (auditor_->schedule().action() != KEYHOLE_AUDIT_REPORT) auditor_->finish_due(layer, step_);
}

bool SessionAudits::act(uint32_t layer, uint32_t kv_head, const Budget& budget) {
  if (!on() || !auditor_->schedule().act(layer, kv_head, step_)) return false;
  auditor_->count_action(layer, kv_head);
  report_action(layer, kv_head, bound_of(budget));
  return !auditor_->schedule().widening(layer, kv_head).exact;
}

void SessionAudits::record(uint32_t layer, uint32_t kv_head, const Budget& budget, HeadWork& work) {
  if (!on()) return;
  const AuditSchedule::Widening& widening = auditor_->schedule().widening(layer, kv_head);
  // Without a search there is nothing to widen: everything is attended, or nothing shall be.
  if (work.index != nullptr && widening.exact) {
    work.index = nullptr;
    work.exact_begin = 0;
  } else if (work.index != nullptr) {
    widen(work.search, widening.factor);
  }
  if (!auditor_->schedule().chosen(layer, kv_head, step_)) return;
  work.record = &auditor_->record(layer, kv_head, step_, budget.top_k, bound_of(budget),
                                  work.index != nullptr);
}

std::optional<uint64_t> SessionAudits::count(uint32_t layer) {
  if (!on()) return std::nullopt;
  AuditSchedule& schedule = auditor_->schedule();
  const uint64_t number = schedule.begin_step(layer);
  for (uint32_t h = 0; h < engine_->model().of(layer).kv_heads; ++h) {
    if (schedule.chosen(layer, h, number)) return number;
  }
  return std::nullopt;
}

HeadRecord* SessionAudits::record(uint32_t layer, uint32_t kv_head, uint64_t number,
                                  const Budget& budget) {
  if (!auditor_->schedule().chosen(layer, kv_head, number)) return nullptr;
  return &auditor_->record(layer, kv_head, number, budget.top_k, bound_of(budget), false);
}

void SessionAudits::submit() {
  if (!on()) return;
  auditor_->submit();
  count_bytes();
}

void SessionAudits::discard() {
  if (on()) auditor_->discard();
}

void SessionAudits::report_action(uint32_t layer, uint32_t kv_head, float bound) {
  actions_ += 1;
  if (!std::has_single_bit(actions_)) return;
  const AuditSchedule::Widening& widening = auditor_->schedule().widening(layer, kv_head);
  char now[48] = "attends everything exactly";
  if (!widening.exact) {
    std::snprintf(now, sizeof now, "reads %u times its budget", widening.factor);
  }
  char text[200];
  std::snprintf(text, sizeof text,
                "layer %u, KV head %u: an audit has found an output error above %g, so the head %s "
                "from now on (%llu such actions so far)",
                layer, kv_head, static_cast<double>(bound), now,
                static_cast<unsigned long long>(actions_));
  engine_->log()(KEYHOLE_LOG_WARNING, text);
}

// ---- Between steps ------------------------------------------------------------------------------

uint32_t SessionAudits::widened_top_k(size_t head, uint32_t top_k) const {
  return on() ? widened(top_k, auditor_->schedule().widenings()[head].factor) : top_k;
}

void SessionAudits::reset_widening(size_t head) {
  if (on()) auditor_->schedule().reset_widening(head);
}

void SessionAudits::reserve(uint32_t top_k) {
  if (!on()) return;
  auditor_->reserve(top_k);
  count_bytes();
}

void SessionAudits::finish() {
  if (on()) auditor_->finish();
}

void SessionAudits::finish_reading(uint32_t layer, uint32_t rows) {
  if (on()) auditor_->finish_reading(layer, rows);
}

keyhole_audit SessionAudits::summary(std::span<const size_t> heads) {
  AuditFigures sum;
  if (on()) {
    auditor_->finish();
    for (const size_t i : heads) sum.merge(auditor_->figures()[i]);
  }
  return sum.summary();
}

void SessionAudits::reset_figures() {
  if (!on()) return;
  auditor_->finish();
  auditor_->reset_figures();
}

// ---- Copies -------------------------------------------------------------------------------------

void SessionAudits::save(ChecksumWriter& out) const {
  if (!on()) return;
  const AuditSchedule& schedule = auditor_->schedule();
  for (const uint64_t step : schedule.steps()) out.value(step);
  for (const AuditSchedule::Widening& w : schedule.widenings()) {
    out.value(w.factor);
    out.value(static_cast<uint32_t>(w.exact));
    out.value(w.due);
  }
}

void SessionAudits::load(ChecksumReader& in) {
  if (!on()) return;
  AuditSchedule& schedule = auditor_->schedule();
  std::vector<uint64_t> steps(schedule.steps().size());
  std::vector<AuditSchedule::Widening> widenings(schedule.widenings().size());
  for (uint64_t& step : steps) step = in.value<uint64_t>("audit state");
  for (AuditSchedule::Widening& w : widenings) {
    w.factor = in.value<uint32_t>("audit state");
    const auto exact = in.value<uint32_t>("audit state");
    if (exact > 1) {
      throw Error(Status::corrupt, "audit state with a flag of " + std::to_string(exact));
    }
    w.exact = exact != 0;
    w.due = in.value<uint64_t>("audit state");
  }
  if (!schedule.restore(std::move(steps), std::move(widenings))) {
    throw Error(Status::corrupt, "audit state that no session has");
  }
}

void SessionAudits::copy_from(const SessionAudits& from) {
  if (!on()) return;
  const AuditSchedule& schedule = from.auditor_->schedule();
  (void)auditor_->schedule().restore(schedule.steps(), schedule.widenings());
}

void SessionAudits::take_figures(const SessionAudits& from) {
  if (!on()) return;
  from.auditor_->finish();
  auditor_->take_figures(*from.auditor_);
  actions_ = from.actions_;
}

}  // namespace keyhole::runtime
