// The destination of a step's results, one KV head after the other, each as soon as it is complete.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/types.h"

namespace keyhole::runtime {

/// Takes the merged state of every KV head. The step's tasks call it, for different heads at once.
class ResultSink {
 public:
  virtual ~ResultSink() = default;
  /// Where to write the head's state, o `[group, head_dim]`, lse `[group]`. Called once in a step.
  [[nodiscard]] virtual StateView slot(uint32_t kv_head) = 0;
  /// Says that the head's slot has been written.
  virtual void deliver(uint32_t kv_head) = 0;
};

/// A sink that keeps results in arrays: o `[kv_heads, group, head_dim]`, lse `[kv_heads, group]`.
class ResultArrays final : public ResultSink {
 public:
  /// Memory for `heads` states with `numbers` components together.
  ResultArrays(size_t heads, size_t numbers) : o_(numbers), lse_(heads) {}

  /// Sets the shape of the results from now on, which together need no more than there is memory for.
  void set_shape(uint32_t group, uint32_t dim) {
    group_ = group;
    dim_ = dim;
  }
  [[nodiscard]] StateView slot(uint32_t kv_head) override {
    const size_t head = size_t{kv_head} * group_;
    return {o_.data() + head * dim_, lse_.data() + head};
  }
  void deliver(uint32_t /*kv_head*/) override {}

  /// The states of all heads.
  [[nodiscard]] StateView all() { return {o_.data(), lse_.data()}; }
  [[nodiscard]] const float* o() const { return o_.data(); }
  [[nodiscard]] const float* lse() const { return lse_.data(); }
  [[nodiscard]] size_t bytes() const { return (o_.size() + lse_.size()) * sizeof(float); }

 private:
  uint32_t group_ = 0, dim_ = 0;
  std::vector<float> o_, lse_;
};

}  // namespace keyhole::runtime
