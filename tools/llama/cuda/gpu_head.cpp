#include "tools/llama/gpu_head.h"

#include <cuda_fp16.h>

#include <vector>

#include "tools/api/handles.h"
#include "tools/llama/cuda/memory.h"

namespace keyhole::tools {

struct GpuHead::Memory {
  cuda::OwnStream stream;
  cuda::Event begin{cudaEventDefault}, end{cudaEventDefault};
  cuda::Buffer<__half> q, k, v;
  cuda::Buffer<float> out, lse;
  std::vector<__half> rounded;

  void reserve(size_t tokens, uint32_t dim) {
    if (lse.size() >= tokens) return;
    for (cuda::Buffer<__half>* rows : {&q, &k, &v}) *rows = cuda::Buffer<__half>(tokens * dim);
    out = cuda::Buffer<float>(tokens * dim);
    lse = cuda::Buffer<float>(tokens);
  }
  void copy(const float* from, size_t width, size_t tokens, uint32_t dim, __half* to) {
    rounded.resize(tokens * dim);
    for (size_t t = 0; t < tokens; ++t) {
      for (uint32_t j = 0; j < dim; ++j) {
        rounded[t * dim + j] = __float2half_rn(from[t * width + j]);
      }
    }
    cuda::copy_now(to, rounded.data(), rounded.size());
  }
};

GpuHead::GpuHead(uint32_t dim) : dim_(dim), memory_(std::make_unique<Memory>()) {}
GpuHead::~GpuHead() = default;

void GpuHead::take(const HeadRows& head) {
  // Work of the model that is under way would count as attention's time.
  cuda::check(cudaDeviceSynchronize(), "waiting for the GPU");
  tokens_ = head.tokens;
  memory_->reserve(tokens_, dim_);
  memory_->copy(head.q, head.q_width, tokens_, dim_, memory_->q.get());
  memory_->copy(head.k, head.kv_width, tokens_, dim_, memory_->k.get());
  memory_->copy(head.v, head.kv_width, tokens_, dim_, memory_->v.get());
}

double GpuHead::attend(keyhole_prompt* prompt, float* out, float* lse) {
  const auto rows = [&](void* data, keyhole_dtype dtype) {
    keyhole_tensor t{};
    t.data = data;
    t.dtype = dtype;
    t.memory = KEYHOLE_DEVICE;
    t.rank = 3;
    t.shape[0] = static_cast<int64_t>(tokens_), t.shape[1] = 1, t.shape[2] = dim_;
    t.strides[0] = dim_, t.strides[1] = dim_, t.strides[2] = 1;
    return t;
  };
  Memory& m = *memory_;
  const keyhole_tensor q = rows(m.q.get(), KEYHOLE_F16), k = rows(m.k.get(), KEYHOLE_F16),
                       v = rows(m.v.get(), KEYHOLE_F16), o = rows(m.out.get(), KEYHOLE_F32);
  m.begin.record(m.stream.get());
  check(keyhole_prompt_attend(prompt, 0, &q, &k, &v, &o, m.lse.get(), m.stream.get()));
  m.end.record(m.stream.get());
  m.end.wait();
  float milliseconds = 0.0F;
  cuda::check(cudaEventElapsedTime(&milliseconds, m.begin.get(), m.end.get()), "an event");
  cuda::copy_now(out, m.out.get(), tokens_ * dim_);
  cuda::copy_now(lse, m.lse.get(), tokens_);
  constexpr double kPerSecond = 1e3;
  return double{milliseconds} / kPerSecond;
}

}  // namespace keyhole::tools
