// Indexes of a session as its calls see them: built when the caller asks, grown by steps, within the session's memory.
#pragma once

#include <cstdint>

#include "runtime/indexing/index_keeper.h"
#include "runtime/session/host_memory.h"
#include "runtime/session/host_steps.h"

namespace keyhole::runtime {

class SessionIndexing {
 public:
  /// All that it is given outlives it.
  SessionIndexing(IndexKeeper& keeper, HostSteps& steps, HostMemory& memory)
      : keeper_(&keeper), steps_(&steps), memory_(&memory) {}

  /// See keyhole_session_build. Throws as IndexKeeper::build().
  void build(const BuildProgress& progress) {
    keeper_->build(progress, [this](bool has_first) { steps_->reserve(has_first); });
  }
  /// Whether the next step of the layer takes a block of pending rows in, or begins one.
  [[nodiscard]] bool append_is_due(uint32_t layer) const { return keeper_->append_is_due(layer); }
  /// Takes the block in, or begins it, if a step of the layer is to. Logs what fails.
  void advance_append(uint32_t layer) {
    if (!keeper_->advance_append(layer)) return;
    steps_->try_to_reserve(layer, "its larger index has no memory for searches");
  }

  /// Throws Error(out_of_memory) where an index of so many bytes, and what searches in it take, would pass the limit.
  void check_memory(uint64_t more_bytes, const char* what) const {
    if (!memory_->is_limited()) return;
    if (!keeper_->has_first_under_way()) more_bytes += steps_->first_search_bytes();
    memory_->check(more_bytes, what);
  }
  /// What indexes under way will add to the memory held.
  [[nodiscard]] uint64_t promised_bytes() const {
    return keeper_->promised_bytes() +
           (keeper_->has_first_under_way() ? steps_->first_search_bytes() : 0);
  }

 private:
  IndexKeeper* keeper_;
  HostSteps* steps_;
  HostMemory* memory_;
};

}  // namespace keyhole::runtime
