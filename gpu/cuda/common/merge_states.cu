// One warp per row: it finds the largest lse and the sum of weights, then merges 128 elements at a time.
#include "gpu/states.h"

#include <algorithm>
#include <string>

#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/device.h"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kWarps = 4;     // of a block
constexpr uint32_t kElements = 4;  // of a row, that a thread merges at a time
constexpr uint32_t kFewStates =
    240;  // whose pointers fit the 4 KB of parameters that every launch copies

template <uint32_t kStates>
struct Params {
  const void* o[kStates];
  const float* lse[kStates];
  uint32_t count, rows, dim;
  DType dtype, out_dtype;
  float to_log2;    // log2 b of the lse's base b
  float from_log2;  // 1 / to_log2
  void* out;
  float* out_lse;
};
static_assert(sizeof(Params<kFewStates>) <= 4096);
static_assert(sizeof(Params<kMostMergedStates>) <= 32764);

__device__ void store_element(void* data, DType dtype, size_t at, float x) {
  switch (dtype) {
    case DType::f16: static_cast<__half*>(data)[at] = rounded_to<__half>(x); break;
    case DType::bf16: static_cast<__nv_bfloat16*>(data)[at] = rounded_to<__nv_bfloat16>(x); break;
    default: static_cast<float*>(data)[at] = x;
  }
}

template <uint32_t kStates>
__global__ void __launch_bounds__(kWarps* kWarp)
    merge_states_kernel(const __grid_constant__ Params<kStates> p) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t row = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (row >= p.rows) return;

  float largest = kMinusInf;  // fmaxf() passes over NaN, the sum below does not
  for (uint32_t i = lane; i < p.count; i += kWarp) largest = fmaxf(largest, p.lse[i][row]);
  const float base = finite_base(warp_max(largest));
  float sum = 0.0F;
  for (uint32_t i = lane; i < p.count; i += kWarp) {
    sum += exp2f((p.lse[i][row] - base) * p.to_log2);
  }
  sum = warp_sum(sum);
  const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;

  const size_t first = size_t{row} * p.dim;
  for (uint32_t begin = 0; begin < p.dim; begin += kElements * kWarp) {
    float merged[kElements] = {};
    for (uint32_t i = 0; i < p.count; ++i) {
      const float lse = p.lse[i][row];
      if (lse == kMinusInf) continue;
      const float weight = exp2f((lse - base) * p.to_log2) * inverse;
#pragma unroll
      for (uint32_t j = 0; j < kElements; ++j) {
        const uint32_t e = begin + j * kWarp + lane;
        if (e < p.dim) merged[j] += weight * load_element(p.o[i], p.dtype, first + e);
      }
    }
    // In place: no other thread reads these elements, and this one has read them in all states.
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) {
      const uint32_t e = begin + j * kWarp + lane;
      if (e < p.dim) store_element(p.out, p.out_dtype, first + e, merged[j]);
    }
  }
  __syncwarp();  // all threads have read the row's lse, one of which may be out_lse
  if (lane == 0) p.out_lse[row] = base + log2f(sum) * p.from_log2;  // log2f(0) = -inf
}

template <uint32_t kStates>
void launch(const StateMerge& m, Stream stream) {
  Params<kStates> p;
  std::copy_n(m.o, m.count, p.o);
  std::copy_n(m.lse, m.count, p.lse);
  p.count = m.count;
  p.rows = m.rows;
  p.dim = m.dim;
  p.dtype = m.dtype;
  p.out_dtype = m.out_dtype;
  p.to_log2 = m.base2 ? 1.0F : kLog2E;
  p.from_log2 = m.base2 ? 1.0F : kLn2;
  p.out = m.out;
  p.out_lse = m.out_lse;
  const uint32_t blocks = (m.rows - 1) / kWarps + 1;
  merge_states_kernel<kStates><<<blocks, kWarps * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(p);
}

}  // namespace

void merge_states(const StateMerge& merge, Stream stream) {
  if (merge.count <= kFewStates) {
    launch<kFewStates>(merge, stream);
  } else {
    launch<kMostMergedStates>(merge, stream);
  }
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    throw Error(Status::unsupported, "merging states in device memory: " + cuda_status());
  }
  check(error, "merging attention states");
}

}  // namespace keyhole::gpu
