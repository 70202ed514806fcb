// What the steps of a session have cost since its statistics were reset.
#pragma once

#include "keyhole/inspect.h"
#include "keyhole/keyhole.h"
#include "runtime/step/cost.h"

namespace keyhole::runtime {

class StepTotals {
 public:
  /// A step of the host's that has answered so many tokens.
  void add(const StepCost& cost, uint32_t tokens = 1);
  /// A search whose tokens nobody has attended.
  void add_search(const StepCost& cost);
  /// Tokens that the device has answered without the host, and the offloaded keys that it has attended, once for each
  /// query head.
  void add_on_device(uint64_t tokens, uint64_t keys_attended);
  /// KV heads of such tokens whose codes could not tell which rows weigh, and those of them of which all rows were
  /// read.
  void add_doubts(uint64_t doubted, uint64_t given_up);
  /// Seconds of a call, of which `append` went before its first answer or after its last.
  void add_seconds(double append, double attend);

  /// The fields that calls above have written; all others are 0.
  [[nodiscard]] const keyhole_statistics& figures() const { return totals_; }
  void reset() { totals_ = {}; }

 private:
  keyhole_statistics totals_{};
};

}  // namespace keyhole::runtime
