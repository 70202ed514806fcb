// For tests of steps on a stream: the stream, and the tensors of one layer's step.
#pragma once

#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {

class OwnedStream {
 public:
  OwnedStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~OwnedStream() { (void)cudaStreamDestroy(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// The tensors of a layer in device memory, with `gap` elements between the rows of a tensor.
struct LayerTensors {
  LayerTensors(const ResidentShape& s, DType dtype, uint32_t gap)
      : q(s.q_heads, s.head_dim, dtype, gap),
        k(s.kv_heads, s.head_dim, dtype, gap),
        v(s.kv_heads, s.head_dim, dtype, gap),
        out(s.q_heads, s.head_dim, dtype, gap),
        lse(1, s.q_heads, DType::f32) {}
  DeviceArray q, k, v, out, lse;
};

}  // namespace keyhole::gpu::test
