// The states of ranks on a stream that needs no GPU (fake_stream.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "gpu/rank_states.h"
#include "tests/runtime/fake_stream.h"

namespace keyhole::test {

class FakeRankStates final : public gpu::RankStates {
 public:
  FakeRankStates(const gpu::RankStatesShape& shape, const cpu::Kernels& kernels, FakeStream& stream)
      : ranks_(shape.ranks), kernels_(&kernels), stream_(&stream) {
    const size_t state = size_t{shape.rows} * (shape.dim + 1);
    own_.resize(state);
    all_.resize(state * ranks_);
  }
  ~FakeRankStates() override { stream_->wait(); }
  std::function<void()> on_call = [] {};

  float* own() override { return own_.data(); }
  float* all() override { return all_.data(); }
  void fill(Nothing what, uint32_t rows, uint32_t dim, gpu::Stream) override {
    on_call();
    stream_->push([=, this] {
      float* const lse = own_.data() + size_t{rows} * dim;
      const bool empty = what == Nothing::empty;
      std::fill(own_.data(), lse, empty ? 0.0F : NAN);
      std::fill_n(lse, rows, empty ? kMinusInf : NAN);
    });
  }
  void merge(uint32_t rows, uint32_t dim, void* out, DType dtype, float* lse,
             gpu::Stream) override {
    on_call();
    stream_->push([=, this] {
      std::vector<StateView> states(ranks_);
      for (uint32_t r = 0; r < ranks_; ++r) {
        float* const state = all_.data() + size_t{r} * rows * (dim + 1);
        states[r] = {state, state + size_t{rows} * dim};
      }
      std::vector<float> o(size_t{rows} * dim), sums(rows);
      cpu::merge_states(states, rows, dim, {o.data(), sums.data()});
      kernels_->from_f32[static_cast<int>(dtype)](o.data(), static_cast<std::byte*>(out),
                                                  rows * dim);
      if (lse != nullptr) std::copy(sums.begin(), sums.end(), lse);
    });
  }
  bool is_done(gpu::Stream) override { return stream_->is_idle(); }

 private:
  uint32_t ranks_;
  const cpu::Kernels* kernels_;
  FakeStream* stream_;
  std::vector<float> own_, all_;
};

}  // namespace keyhole::test
