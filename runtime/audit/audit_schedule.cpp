#include "runtime/audit/audit_schedule.h"

#include <bit>

namespace keyhole::runtime {

bool AuditSchedule::restore(std::vector<uint64_t> steps, std::vector<Widening> widenings) {
  if (steps.size() != steps_.size() || widenings.size() != widenings_.size()) return false;
  for (size_t i = 0; i < widenings.size(); ++i) {
    const Widening& r = widenings[i];
    const uint64_t now = steps[heads_.layer_of(i)];
    if (!std::has_single_bit(r.factor) || r.factor > kMostWidening) return false;
    // An action is due within kLag steps of the step that was audited, which is over.
    if (r.due != kNever && (r.due < now || r.due - now >= kLag)) return false;
    if (action_ != KEYHOLE_AUDIT_WIDEN && r.factor != 1) return false;
    if (action_ != KEYHOLE_AUDIT_EXACT && r.exact) return false;
    if ((action_ == KEYHOLE_AUDIT_REPORT || r.exact || r.factor == kMostWidening) &&
        r.due != kNever) {
      return false;
    }
  }
  steps_ = std::move(steps);
  widenings_ = std::move(widenings);
  return true;
}

}  // namespace keyhole::runtime
