// The states that a KV head's tasks leave, and the order in which they are merged: resident tokens, parts of the
// search, exact chunks, tail. The order is fixed, so that the result has the same bits for any number of threads.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/step/step_plan.h"

namespace keyhole::runtime {

/// The states from which the output of a KV head is merged.
struct HeadStates {
  std::array<StateView, 2 + kMaxParts + kMaxChunks> states;
  size_t count = 0;
  StateView resident{};  ///< the first state; null: the host does not merge it
  StateView tail{};      ///< the last state; null: none

  void add(StateView s) { states[count++] = s; }
  [[nodiscard]] std::span<const StateView> all() const { return {states.data(), count}; }
  /// All states except the tail.
  [[nodiscard]] std::span<const StateView> read() const {
    return all().first(tail.lse != nullptr ? count - 1 : count);
  }
};

/// Memory for the states of all tasks.
class StateSlots {
 public:
  /// Memory for `heads` query heads with `numbers` components together.
  StateSlots(size_t heads, size_t numbers) : o_(kSlots * numbers), lse_(kSlots * heads) {}

  /// Sets the shape of the states from now on, which together need no more than there is memory for.
  void set_shape(uint32_t group, uint32_t dim) {
    group_ = group;
    dim_ = dim;
  }
  [[nodiscard]] StateView part(uint32_t kv_head, uint32_t number) { return at(kv_head, number); }
  [[nodiscard]] StateView chunk(uint32_t kv_head, uint32_t number) {
    return at(kv_head, kMaxParts + number);
  }
  [[nodiscard]] StateView tail(uint32_t kv_head) { return at(kv_head, kMaxParts + kMaxChunks); }
  [[nodiscard]] size_t bytes() const { return (o_.size() + lse_.size()) * sizeof(float); }

 private:
  static constexpr uint32_t kSlots = kMaxParts + kMaxChunks + 1;
  [[nodiscard]] StateView at(uint32_t kv_head, uint32_t slot) {
    const size_t s = (size_t{kv_head} * kSlots + slot) * group_;
    return {o_.data() + s * dim_, lse_.data() + s};
  }

  uint32_t group_ = 0, dim_ = 0;
  std::vector<float> o_, lse_;  // `[kv_heads, kSlots, group, dim]`, without dim
};

}  // namespace keyhole::runtime
