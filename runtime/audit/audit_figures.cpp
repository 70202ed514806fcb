#include "runtime/audit/audit_figures.h"

namespace keyhole::runtime {

void AuditFigures::add(const AuditResult& result, uint32_t head, float estimated_missing,
                       float bound) {
  const double missing = result.missing[head];
  ++audits_;
  if (result.error[head] > bound) ++over_bound_;
  error_ += result.error[head];
  errors_.add(result.error[head]);
  mass_ += result.mass[head];
  odds_.add(missing > 0.0 ? result.mass[head] / missing : std::numeric_limits<double>::infinity());
  missing_ += missing;
  estimated_ += estimated_missing;
  difference_ += std::abs(estimated_missing - missing);
  if (result.has_recall) {
    ++recalls_;
    recall_ += result.recall[head];
  }
}

void AuditFigures::merge(const AuditFigures& other) {
  audits_ += other.audits_;
  over_bound_ += other.over_bound_;
  actions_ += other.actions_;
  waits_ += other.waits_;
  recalls_ += other.recalls_;
  error_ += other.error_;
  mass_ += other.mass_;
  recall_ += other.recall_;
  missing_ += other.missing_;
  estimated_ += other.estimated_;
  difference_ += other.difference_;
  seconds_ += other.seconds_;
  errors_.merge(other.errors_);
  odds_.merge(other.odds_);
}

keyhole_audit AuditFigures::summary() const {
  keyhole_audit a{};
  a.struct_size = sizeof a;
  a.audits = audits_;
  a.waits = waits_;
  a.over_bound = over_bound_;
  a.actions = actions_;
  a.seconds = seconds_;
  if (recalls_ != 0) a.recall = recall_ / static_cast<double>(recalls_);
  if (audits_ == 0) return a;
  const auto n = static_cast<double>(audits_);
  a.error_mean = error_ / n;
  a.error_median = errors_.quantile(0.5);
  a.error_p95 = errors_.quantile(0.95);
  a.error_max = errors_.most();
  a.error_p99 = errors_.quantile(0.99);
  a.mass_mean = mass_ / n;
  const double odds = odds_.quantile(0.05);
  a.mass_p05 = std::isinf(odds) ? 1.0 : odds / (1.0 + odds);
  a.missing_mean = missing_ / n;
  a.estimated_missing_mean = estimated_ / n;
  a.missing_error_mean = difference_ / n;
  return a;
}

}  // namespace keyhole::runtime
