#include "gpu/cuda/common/rank_states.h"

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/states.h"

namespace keyhole::gpu {
namespace {

class CudaRankStates final : public RankStates {
 public:
  CudaRankStates(int ordinal, const RankStatesShape& shape)
      : ordinal_(ordinal), ranks_(shape.ranks), o_(shape.ranks), lse_(shape.ranks) {
    const DeviceScope scope(ordinal);
    const size_t state = size_t{shape.rows} * (shape.dim + 1);
    memory_ = DeviceBuffer((state * (shape.ranks + 1) + shape.rows) * sizeof(float));
    own_ = memory_.as<float>();
    all_ = own_ + state;
    unwanted_lse_ = all_ + state * shape.ranks;
  }

  float* own() override { return own_; }
  float* all() override { return all_; }

  void fill(Nothing what, uint32_t rows, uint32_t dim, Stream stream) override {
    const DeviceScope scope(ordinal_);
    float* const lse = own_ + size_t{rows} * dim;
    if (what == Nothing::empty) {
      // Merging no state at all gives the empty one.
      merge_states({.rows = rows, .dim = dim, .out = own_, .out_lse = lse}, stream);
      return;
    }
    check(cudaMemsetAsync(own_, 0xff, size_t{rows} * (dim + 1) * sizeof(float),
                          static_cast<cudaStream_t>(stream)),
          "filling a state");
  }

  void merge(uint32_t rows, uint32_t dim, void* out, DType dtype, float* lse,
             Stream stream) override {
    const DeviceScope scope(ordinal_);
    for (uint32_t r = 0; r < ranks_; ++r) {
      const float* const state = all_ + size_t{r} * rows * (dim + 1);
      o_[r] = state;
      lse_[r] = state + size_t{rows} * dim;
    }
    merge_states({.o = o_.data(),
                  .lse = lse_.data(),
                  .count = ranks_,
                  .rows = rows,
                  .dim = dim,
                  .out = out,
                  .out_dtype = dtype,
                  .out_lse = lse == nullptr ? unwanted_lse_ : lse},
                 stream);
  }

  bool is_done(Stream stream) override {
    const DeviceScope scope(ordinal_);
    const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream));
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    return true;
  }

 private:
  int ordinal_;
  uint32_t ranks_;
  DeviceBuffer memory_;
  float *own_ = nullptr, *all_ = nullptr, *unwanted_lse_ = nullptr;
  std::vector<const void*> o_;  // [ranks]
  std::vector<const float*> lse_;
};

}  // namespace

std::unique_ptr<RankStates> make_cuda_rank_states(int ordinal, const RankStatesShape& shape) {
  if (shape.ranks > kMostMergedStates) {
    throw Error(Status::unsupported, std::to_string(shape.ranks) +
                                         " ranks with tensors in device memory, allowed: 1.." +
                                         std::to_string(kMostMergedStates));
  }
  return std::make_unique<CudaRankStates>(ordinal, shape);
}

}  // namespace keyhole::gpu
