#include "runtime/session/host_batch.h"

#include <algorithm>

namespace keyhole::runtime {
namespace {

// Steps of a batch that are under way at once: as many jobs as the pool publishes (64), with room for others.
constexpr size_t kStepsAtOnce = 32;

/// False where it throws: the member has failed then.
template <class F>
bool succeeds(const HostBatch::Member& member, F&& body) {
  try {
    return body();
  } catch (...) {
    *member.error = std::current_exception();
    return false;
  }
}

}  // namespace

HostBatch::HostBatch(uint32_t layer, std::span<const Member> members)
    : layer_(layer), members_(members), slots_(std::min(kStepsAtOnce, members.size())) {
  steps_.reserve(slots_.size());
  sessions_.reserve(slots_.size());
}

bool HostBatch::go_on(Slot& slot, bool in_rounds) {
  return succeeds(*slot.member, [&] {
    if (slot.extension->prepare()) {
      if (!in_rounds) slot.extension->launch();
      return true;
    }
    slot.extension->append();
    return false;
  });
}

bool HostBatch::finish(Slot& slot) {
  return succeeds(*slot.member, [&] {
    slot.extension->finish();
    return true;
  });
}

bool HostBatch::have_copies() const {
  for (size_t i = 1; i < members_.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (members_[i].session->is_copy(layer_, *members_[j].session)) return true;
    }
  }
  return false;
}

void HostBatch::take_next(Slot& slot, bool in_rounds) {
  slot.extension.reset();
  while (next_ < members_.size()) {
    slot.member = &members_[next_++];
    const bool begun = succeeds(*slot.member, [&] {
      slot.extension = slot.member->session->begin(layer_, *slot.member->args);
      return true;
    });
    if (begun && go_on(slot, in_rounds)) return;
    slot.extension.reset();
  }
}

void HostBatch::run_by_turns() {
  for (Slot& slot : slots_) take_next(slot, false);
  for (bool some = true; some;) {
    some = false;
    for (Slot& slot : slots_) {
      if (slot.extension == nullptr) continue;
      some = true;
      if (!finish(slot) || !go_on(slot, false)) take_next(slot, false);
    }
  }
}

void HostBatch::run_in_rounds() {
  for (Slot& slot : slots_) take_next(slot, true);
  for (bool some = true; some;) {
    share_pass();
    for (Slot& slot : slots_) {
      if (slot.extension == nullptr) continue;
      const bool launched = succeeds(*slot.member, [&] {
        slot.extension->launch();
        return true;
      });
      if (!launched) slot.extension.reset();
    }
    some = false;
    for (Slot& slot : slots_) {
      const bool goes_on = slot.extension != nullptr && finish(slot) && go_on(slot, true);
      if (!goes_on) take_next(slot, true);
      some = some || slot.extension != nullptr;
    }
  }
}

void HostBatch::share_pass() {
  steps_.clear();
  sessions_.clear();
  for (Slot& slot : slots_) {
    if (slot.extension == nullptr) continue;
    steps_.push_back(&slot.extension->plan());
    sessions_.push_back(slot.member->session);
  }
  if (steps_.size() < 2) return;
  // One that has made a pass before keeps its memory.
  HostExtends* owner = sessions_[0];
  for (HostExtends* s : sessions_) {
    if (s->steps().has_common_pass()) owner = s;
  }
  owner->steps().share_pass(layer_, steps_, [&](size_t i, size_t j) {
    return sessions_[i]->common_rows(layer_, *sessions_[j]);
  });
}

}  // namespace keyhole::runtime
