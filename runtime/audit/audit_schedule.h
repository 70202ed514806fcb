// Which steps are audited, and from which step on an action takes effect. Both depend on the calls
// alone, never on how fast the auditing thread was.
//
// The finding of an audit of step s of a layer takes effect in that layer's step s + kLag, which waits for the audit
// if it must. Until then further audits of the head are of the budget that is about to change: they count in the
// figures and change nothing.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "keyhole/keyhole.h"
#include "runtime/plan/head_numbers.h"

namespace keyhole::runtime {

class AuditSchedule {
 public:
  /// Steps of a layer between an audited step and the effect of its audit: time enough for an audit to be done beside
  /// them.
  static constexpr uint64_t kLag = 16;
  static constexpr uint32_t kMostWidening = 16;
  static constexpr uint64_t kNever = UINT64_MAX;

  /// How much a head reads because of its audits.
  struct Widening {
    uint32_t factor = 1;    ///< times its budget
    bool exact = false;     ///< or it reads everything
    uint64_t due = kNever;  ///< the step in which it grows
    uint32_t epoch = 0;     ///< counts the budgets that the head has had
  };

  AuditSchedule(HeadNumbers heads, double share, keyhole_audit_action action)
      : heads_(std::move(heads)), share_(share), action_(action), steps_(heads_.layers()) {
    widenings_.resize(heads_.count());
  }

  [[nodiscard]] keyhole_audit_action action() const { return action_; }

  /// Counts a step of the layer. Returns its number, from 0 on.
  uint64_t begin_step(uint32_t layer) { return steps_[layer]++; }

  /// True for `share` of all (layer, kv_head, step), in no regular pattern.
  [[nodiscard]] bool chosen(uint32_t layer, uint32_t kv_head, uint64_t step) const {
    // Multiplications carry low bits up, shifts bring high ones down: after three rounds every bit
    // of the result depends on every bit of the arguments.
    uint64_t x = (uint64_t{layer} << 32 | kv_head) * 0x9E3779B97F4A7C15ULL + step;
    for (int round = 0; round < 3; ++round) {
      x = (x ^ (x >> 32)) * 0xD1342543DE82EF95ULL + 0x632BE59BD9B4E019ULL;
    }
    return static_cast<double>((x ^ (x >> 32)) >> 11) * 0x1p-53 < share_;
  }

  [[nodiscard]] const Widening& widening(uint32_t layer, uint32_t kv_head) const {
    return widenings_[heads_.at(layer, kv_head)];
  }

  /// Takes in that an audit of that step found too great an error, with this widening of a budget of that epoch.
  void found_over_bound(uint32_t layer, uint32_t kv_head, uint64_t step, uint32_t factor,
                        uint32_t epoch) {
    Widening& r = at(layer, kv_head);
    if (action_ == KEYHOLE_AUDIT_REPORT || epoch != r.epoch) return;
    if (r.exact || r.due != kNever || factor != r.factor) return;
    if (action_ == KEYHOLE_AUDIT_WIDEN && r.factor >= kMostWidening) return;
    r.due = step + kLag;
  }

  /// Lets the action of a head take effect if it is due in this step. True if it did.
  bool act(uint32_t layer, uint32_t kv_head, uint64_t step) {
    Widening& r = at(layer, kv_head);
    if (step < r.due) return false;
    r.due = kNever;
    if (action_ == KEYHOLE_AUDIT_EXACT) {
      r.exact = true;
    } else {
      r.factor *= 2;
    }
    return true;
  }

  /// Takes in that the head has a new budget, and ends its widening. Audits under way are of the old budget and
  /// change nothing.
  void reset_widening(size_t head) {
    const uint32_t epoch = widenings_[head].epoch + 1;
    widenings_[head] = {};
    widenings_[head].epoch = epoch;
  }

  // For saving and copying; no audit may be under way.
  [[nodiscard]] const std::vector<uint64_t>& steps() const { return steps_; }
  [[nodiscard]] const std::vector<Widening>& widenings() const { return widenings_; }
  /// Puts saved values back. Returns false, and changes nothing, for values that no session has.
  [[nodiscard]] bool restore(std::vector<uint64_t> steps, std::vector<Widening> widenings);

 private:
  [[nodiscard]] Widening& at(uint32_t layer, uint32_t kv_head) {
    return widenings_[heads_.at(layer, kv_head)];
  }

  HeadNumbers heads_;
  double share_;
  keyhole_audit_action action_;
  std::vector<uint64_t> steps_;      // [layer]
  std::vector<Widening> widenings_;  // by heads_
};

}  // namespace keyhole::runtime
