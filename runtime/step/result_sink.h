// Where the results of a step go, one KV head after the other, as soon as all of a head is known.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/types.h"

namespace keyhole::runtime {

/// Takes the merged state of every KV head. Called by the step's tasks, for different heads at once.
class ResultSink {
 public:
  virtual ~ResultSink() = default;
  /// Where the head's state is to be written, o `[group, head_dim]`, lse `[group]`: once in a step.
  [[nodiscard]] virtual StateView slot(uint32_t kv_head) = 0;
  /// The slot has been written.
  virtual void deliver(uint32_t kv_head) = 0;
};

/// Arrays o `[kv_heads, group, head_dim]`, lse `[kv_heads, group]`.
class ResultArrays final : public ResultSink {
 public:
  /// Memory for so many states, and for their components.
  ResultArrays(size_t heads, size_t numbers) : o_(numbers), lse_(heads) {}

  /// Of the results from now on: together no more than there is memory for.
  void set_shape(uint32_t group, uint32_t dim) {
    group_ = group;
    dim_ = dim;
  }
  [[nodiscard]] StateView slot(uint32_t kv_head) override {
    const size_t head = size_t{kv_head} * group_;
    return {o_.data() + head * dim_, lse_.data() + head};
  }
  void deliver(uint32_t /*kv_head*/) override {}

  /// All heads.
  [[nodiscard]] StateView all() { return {o_.data(), lse_.data()}; }
  [[nodiscard]] const float* o() const { return o_.data(); }
  [[nodiscard]] const float* lse() const { return lse_.data(); }
  [[nodiscard]] size_t bytes() const { return (o_.size() + lse_.size()) * sizeof(float); }

 private:
  uint32_t group_ = 0, dim_ = 0;
  std::vector<float> o_, lse_;
};

}  // namespace keyhole::runtime
