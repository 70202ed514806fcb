// What looks at the rows of a step that the host does not see.
#pragma once

#include "gpu/cuda/common/flags.cuh"
#include "gpu/cuda/rings/share.cuh"

namespace keyhole::gpu {

__device__ inline bool is_bad(float x) {
  constexpr float kMost = 3.402823466e38F;
  return !(fabsf(x) <= kMost);
}

/// Tells the host of a NaN or an infinity in q of a KV head's group, or in its k or v once they are rounded to T. In
/// place of publish(), and counts the steps as that does.
template <class T, int D>
__device__ inline void note_bad_rows(const StepParams& p, uint32_t head) {
  constexpr uint32_t kPieces = D * sizeof(T) / 16;
  const uint32_t which = threadIdx.x / 64;
  const TensorView& kv = which == 0 ? p.k : p.v;
  const uint32_t sequence = p.numbers[head] + 1;
  FailureKind kind = FailureKind::none;
#pragma unroll
  for (uint32_t first = 0; first < kPieces; first += 64) {
    const uint32_t piece = first + threadIdx.x % 64;
    if (kv.data == nullptr || piece >= kPieces) break;
    union {
      uint4 bytes;
      T elements[16 / sizeof(T)];
    } stored;
    stored.bytes = rounded_piece<T>(load_piece<T>(kv, head, piece), kv.dtype);
#pragma unroll
    for (uint32_t i = 0; i < 16 / sizeof(T); ++i) {
      if (is_bad(as_float(stored.elements[i]))) {
        kind = which == 0 ? FailureKind::bad_k : FailureKind::bad_v;
      }
    }
  }
  for (uint32_t i = threadIdx.x; i < p.group * (D / 4); i += kThreads) {
    float x[4];
    convert(load_raw(p.q.data, p.q.dtype,
                     (size_t{head} * p.group + i / (D / 4)) * p.q.head_stride + i % (D / 4) * 4),
            p.q.dtype, x);
#pragma unroll
    for (const float e : x) {
      if (is_bad(e)) kind = FailureKind::bad_q;
    }
  }
  if (kind != FailureKind::none) {
    store_relaxed_system(&p.merge.failure->word, failure_word(kind, p.merge.layer, head, sequence));
  }
  __syncthreads();
  if (threadIdx.x == 0) p.numbers[head] = sequence;
}

}  // namespace keyhole::gpu
