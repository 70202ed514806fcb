// New tokens of several sessions with tensors in host memory (keyhole_extend_batch): extensions whose steps are under way
// at once.
//
//   by turns    of one session after the other the step under way is finished and the next begun at once: meanwhile
//               workers have the tasks of all others
//   in rounds   where sessions are copies of one another: a step of each is prepared, what these have in common is done for
//               all of them together (step/common_pass.h), and then each does what is its own
#include <algorithm>

#include "runtime/session/extension.h"

namespace keyhole::runtime {
namespace {

// Steps of a batch that are under way at once: as many jobs as the pool publishes (64), with room for others.
constexpr size_t kStepsAtOnce = 32;
// What less rows take is less than what it takes to do them together.
constexpr uint32_t kLeastCommonRows = 1024;

/// False where it throws: the member has failed then.
template <class F>
bool succeeds(Session::BatchMember& member, F&& body) {
  try {
    return body();
  } catch (...) {
    member.error = std::current_exception();
    return false;
  }
}

}  // namespace

class Session::HostBatch {
 public:
  // Takes the memory before any session changes: from then on only members can fail.
  HostBatch(uint32_t layer, std::span<BatchMember> members)
      : layer_(layer), members_(members), slots_(std::min(kStepsAtOnce, members.size())) {
    steps_.reserve(slots_.size());
    sequences_.reserve(slots_.size());
  }
  void run() { have_copies() ? run_in_rounds() : run_by_turns(); }

 private:
  struct Slot {
    BatchMember* member = nullptr;
    std::unique_ptr<Extension>
        extension;  ///< with a step prepared or under way; null: the slot is free
  };

  [[nodiscard]] bool have_copies() const;
  void run_by_turns();
  void run_in_rounds();
  void share_pass();

  /// Of the next member that has something to do, its extension; in rounds, step by step, prepared alone.
  void take_next(Slot& slot, bool in_rounds);
  /// The slot's next step; false: the session is done, or has failed.
  bool go_on(Slot& slot, bool in_rounds) {
    return succeeds(*slot.member, [&] {
      if (slot.extension->prepare()) {
        if (!in_rounds) slot.extension->launch();
        return true;
      }
      slot.extension->append();
      return false;
    });
  }
  static bool finish(Slot& slot) {
    return succeeds(*slot.member, [&] {
      slot.extension->finish();
      return true;
    });
  }

  uint32_t layer_;
  std::span<BatchMember> members_;
  std::vector<Slot> slots_;
  size_t next_ = 0;
  std::vector<DecodeStep*> steps_;
  std::vector<Session*> sequences_;  ///< of the steps
};

bool Session::HostBatch::have_copies() const {
  const auto takes_part = [](const BatchMember& m) {
    return m.error == nullptr && m.args.k.tokens != 0;
  };
  for (size_t i = 1; i < members_.size(); ++i) {
    if (!takes_part(members_[i])) continue;
    for (size_t j = 0; j < i; ++j) {
      if (takes_part(members_[j]) && members_[i].session->is_copy(layer_, *members_[j].session)) {
        return true;
      }
    }
  }
  return false;
}

bool Session::is_copy(uint32_t layer, const Session& other) const {
  if (has_codes_of(layer, other)) return true;
  const uint32_t rows = sequence_.common_rows(layer, other.sequence_);
  if (rows < kLeastCommonRows) return false;
  for (uint32_t h = 0; h < engine_->model().of(layer).kv_heads; ++h) {
    const size_t first = std::max(exact_from(layer, h), other.exact_from(layer, h));
    if (first + kLeastCommonRows <= rows) return true;
  }
  return false;
}

bool Session::has_codes_of(uint32_t layer, const Session& other) const {
  const index::Index *mine = index_of(layer, 0), *theirs = other.index_of(layer, 0);
  if (mine == nullptr || theirs == nullptr) return false;
  const auto a = index::CodedRows::of(*mine), b = index::CodedRows::of(*theirs);
  if (a.lists != nullptr && b.lists != nullptr) return read_together(*a.lists, *b.lists);
  return a.blocks != nullptr && b.blocks != nullptr &&
         a.blocks->common_blocks(*b.blocks) * kCodeBlock >= kLeastCommonRows;
}

size_t Session::exact_from(uint32_t layer, uint32_t kv_head) const {
  if (params_.mode == KEYHOLE_MODE_EXACT || keeper_.is_dense(layer, kv_head)) return 0;
  return params_.mode == KEYHOLE_MODE_RESIDENT ? sequence_.rows(layer)
                                               : keeper_.head(layer, kv_head).indexed();
}

void Session::HostBatch::take_next(Slot& slot, bool in_rounds) {
  slot.extension.reset();
  while (next_ < members_.size()) {
    slot.member = &members_[next_++];
    if (slot.member->error != nullptr || slot.member->args.k.tokens == 0) continue;
    const bool begun = succeeds(*slot.member, [&] {
      slot.extension =
          std::make_unique<Extension>(*slot.member->session, layer_, slot.member->args);
      return true;
    });
    if (begun && go_on(slot, in_rounds)) return;
    slot.extension.reset();
  }
}

void Session::HostBatch::run_by_turns() {
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

void Session::HostBatch::run_in_rounds() {
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

void Session::HostBatch::share_pass() {
  steps_.clear();
  sequences_.clear();
  for (Slot& slot : slots_) {
    if (slot.extension == nullptr) continue;
    steps_.push_back(&slot.extension->plan());
    sequences_.push_back(slot.member->session);
  }
  if (steps_.size() < 2) return;
  // One that has made a pass before keeps its memory.
  Session* owner = sequences_[0];
  for (Session* s : sequences_) {
    if (s->common_pass_ != nullptr) owner = s;
  }
  try {
    if (owner->common_pass_ == nullptr) {
      owner->common_pass_ = std::make_unique<CommonPass>(*owner->engine_);
    }
    owner->common_pass_->run(layer_, steps_, [&](size_t i, size_t j) {
      return sequences_[i]->sequence_.common_rows(layer_, sequences_[j]->sequence_);
    });
    owner->count_step_bytes();
    owner->check_memory(0, "what copies have in common");
  } catch (const std::exception&) {
    // Each does all by itself, where it was not done.
    owner->common_pass_.reset();
    owner->count_step_bytes();
  }
}

void Session::extend_batch(uint32_t layer, std::span<BatchMember> members) {
  if (!members.empty() && members[0].args.q.on_device) {
    return extend_batch_on_device(layer, members);
  }
  HostBatch(layer, members).run();
}

}  // namespace keyhole::runtime
