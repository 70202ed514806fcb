#include "runtime/session/device_batch.h"

#include <algorithm>
#include <vector>

namespace keyhole::runtime {
namespace {

/// Runs `body`, whose error is the member's.
template <class F>
void attempt(const DeviceMember& member, F&& body) {
  try {
    body();
  } catch (...) {
    *member.error = std::current_exception();
  }
}

}  // namespace

void extend_batch_on_device(uint32_t layer, std::span<const DeviceMember> members) {
  const auto shares_stream = [&](const DeviceMember& member) {
    return std::any_of(members.begin(), members.end(), [&](const DeviceMember& other) {
      return &other != &member && *other.error == nullptr &&
             other.session->runner().stream() == member.session->runner().stream();
    });
  };
  // Taken before any session changes: from here on only members can fail.
  std::vector<const DeviceMember*> together, alone, waiting;
  for (std::vector<const DeviceMember*>* some : {&together, &alone, &waiting}) {
    some->reserve(members.size());
  }
  for (const DeviceMember& member : members) {
    bool joins = shares_stream(member);
    attempt(member, [&] { joins = joins && member.session->takes_one_step(layer, *member.args); });
    if (*member.error == nullptr) (joins ? together : alone).push_back(&member);
  }
  if (together.size() > 1) {
    const auto most = static_cast<uint32_t>(together.size());
    const std::unique_ptr<gpu::StepGroup> group = together[0]->session->runner().make_group(most);
    std::vector<std::exception_ptr> errors(together.size());
    for (const DeviceMember* member : together) {
      attempt(*member, [&] { member->session->prepare_step(layer, *member->args); });
    }
    for (const DeviceMember* member : together) {
      if (*member->error != nullptr) continue;
      const uint32_t before = group->count();
      attempt(*member, [&] { member->session->extend_in_group(layer, *member->args, *group); });
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
  for (const DeviceMember* member : alone) {
    attempt(*member, [&] { member->session->extend(layer, *member->args); });
  }
}

}  // namespace keyhole::runtime
