// One or several new tokens of each of several sessions with tensors in device memory, each on the stream of its session
// (keyhole_extend_batch). Sessions that have a stream in common take their steps together: those over codes on the device by
// one launch for all that are alike (gpu/step_group.h).
//
//   prepare   each waits for the host's part of its step before, for memory to be pinned, for an index
//   add       no step waits in the group for more than the calls of the others
//   launch    what failed to be launched has failed for each of its members
//   the rest  members of many tokens, whose steps wait for one another, and attention of blocks
#include <algorithm>

#include "runtime/session/session.h"

namespace keyhole::runtime {
namespace {

/// Runs `body`, whose error is the member's.
template <class F>
void attempt(Session::BatchMember& member, F&& body) {
  try {
    body();
  } catch (...) {
    member.error = std::current_exception();
  }
}

bool takes_part(const Session::BatchMember& member) {
  return member.error == nullptr && member.args.k.tokens != 0;
}

}  // namespace

bool Session::takes_one_step(uint32_t layer, const ExtendArgs& args) {
  const uint32_t n = args.k.tokens;
  if (engine_->model().slides(layer)) return false;
  if (!stream_->is_capturing()) (void)stream_->settled_tokens(layer);
  return codes_of_step(layer) != nullptr && n <= stream_->most_tokens(layer) &&
         !attends_blocked(layer, n, false) && !extends_by_pattern_there(layer, args);
}

void Session::prepare_step(uint32_t layer, const ExtendArgs& args) {
  release_prompt();
  check_counts(args);
  stream_->prepare_ahead(layer, args.k.tokens);
}

void Session::extend_in_group(uint32_t layer, const ExtendArgs& args, gpu::StepGroup& group) {
  extend_by_steps(layer, args, &group);
}

void Session::fail_in_group(uint32_t layer, const std::exception_ptr& error) {
  const bool captured = stream_->is_capturing();
  try {
    stream_->fail_launch(error);
  } catch (...) {
    if (captured) throw;
    forget_extended(layer);
    wait_idle();
    throw;
  }
}

void Session::extend_batch_on_device(uint32_t layer, std::span<BatchMember> members) {
  const auto shares_stream = [&](const BatchMember& member) {
    return std::any_of(members.begin(), members.end(), [&](const BatchMember& other) {
      return &other != &member && takes_part(other) &&
             other.session->stream_->stream() == member.session->stream_->stream();
    });
  };
  // Taken before any session changes: from here on only members can fail.
  std::vector<BatchMember*> together, alone, waiting;
  for (std::vector<BatchMember*>* some : {&together, &alone, &waiting}) {
    some->reserve(members.size());
  }
  for (BatchMember& member : members) {
    if (!takes_part(member)) continue;
    bool joins = shares_stream(member);
    attempt(member, [&] { joins = joins && member.session->takes_one_step(layer, member.args); });
    if (member.error == nullptr) (joins ? together : alone).push_back(&member);
  }
  if (together.size() > 1) {
    const auto most = static_cast<uint32_t>(together.size());
    const std::unique_ptr<gpu::StepGroup> group = together[0]->session->stream_->make_group(most);
    std::vector<std::exception_ptr> errors(together.size());
    for (BatchMember* member : together) {
      attempt(*member, [&] { member->session->prepare_step(layer, member->args); });
    }
    for (BatchMember* member : together) {
      if (member->error != nullptr) continue;
      const uint32_t before = group->count();
      attempt(*member, [&] { member->session->extend_in_group(layer, member->args, *group); });
      if (group->count() != before) waiting.push_back(member);
    }
    errors.resize(waiting.size());
    group->launch(errors);
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (errors[i] == nullptr) continue;
      attempt(*waiting[i], [&] { waiting[i]->session->fail_in_group(layer, errors[i]); });
    }
  } else {
    alone.insert(alone.end(), together.begin(), together.end());
  }
  for (BatchMember* member : alone) {
    attempt(*member, [&] { member->session->extend_on_device(layer, member->args); });
  }
}

}  // namespace keyhole::runtime
