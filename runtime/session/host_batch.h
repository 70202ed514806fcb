// New tokens of several sessions with tensors in host memory (keyhole_session_extend_batch): extensions whose steps are
// under way at once.
//
//   by turns    of one session after the other the step under way is finished and the next begun at once: meanwhile
//               workers have the tasks of all others
//   in rounds   where sessions are copies of one another: a step of each is prepared, what these have in common is done
//               for all of them together (step/common_pass.h), and then each does what is its own
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "runtime/session/host_extends.h"

namespace keyhole::runtime {

class HostBatch {
 public:
  struct Member {
    HostExtends* session = nullptr;
    const ExtendArgs* args = nullptr;
    std::exception_ptr* error = nullptr;  ///< why it has failed; it takes no part then
  };
  /// The members are different sessions of one engine, each with new tokens of the layer, and outlive it. It takes its
  /// memory before any session changes: from then on only members can fail.
  HostBatch(uint32_t layer, std::span<const Member> members);
  void run() { have_copies() ? run_in_rounds() : run_by_turns(); }

 private:
  struct Slot {
    const Member* member = nullptr;
    /// With a step prepared or under way; null: the slot is free.
    std::unique_ptr<HostExtension> extension;
  };

  [[nodiscard]] bool have_copies() const;
  void run_by_turns();
  void run_in_rounds();
  void share_pass();
  /// Gives the slot the extension of the next member that has something to do; in rounds its first step is only
  /// prepared.
  void take_next(Slot& slot, bool in_rounds);
  /// The slot's next step; false: the session is done, or has failed.
  bool go_on(Slot& slot, bool in_rounds);
  static bool finish(Slot& slot);

  uint32_t layer_;
  std::span<const Member> members_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
  std::vector<DecodeStep*> steps_;
  std::vector<HostExtends*> sessions_;  ///< of the steps
};

}  // namespace keyhole::runtime
