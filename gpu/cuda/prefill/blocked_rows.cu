// Kernels on rows before and after blocked attention; none of them takes time beside the attention itself.
#include "gpu/cuda/common/check.h"
#include "gpu/cuda/common/element.cuh"
#include "gpu/cuda/common/state.cuh"
#include "gpu/cuda/prefill/blocked_kernels.h"
#include "gpu/cuda/prefill/ends.cuh"

namespace keyhole::gpu {
namespace {

constexpr uint32_t kThreads = 256;
uint32_t blocks_for(size_t quads) {
  return static_cast<uint32_t>((quads + kThreads - 1) / kThreads);
}

/// Quad number i of `[n, heads, dim]`.
struct Place {
  size_t token, head, at;
  __device__ Place(size_t i, uint32_t heads, uint32_t dim) {
    const uint32_t quads = dim / 4;
    at = i % quads * 4;
    head = i / quads % heads;
    token = i / quads / heads;
  }
};

__device__ inline void load_quad(const TensorView& from, const Place& p, float (&x)[4]) {
  convert(load_raw(from.data, from.dtype,
                   p.token * from.token_stride + p.head * from.head_stride + p.at),
          from.dtype, x);
}

__global__ void split_kernel(TensorView from, size_t quads, uint32_t heads, uint32_t dim, DType to,
                             void* high, void* low, uint32_t* bad) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= quads) return;
  float x[4], y[4];
  load_quad(from, {i, heads, dim}, x);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (bad != nullptr && !isfinite(x[j])) *bad = 1;
    // Numbers beyond fp16 become the nearest that it has, and the rest, as far as it goes, the second part. What is not
    // finite stays so: fmaxf() would take a NaN for a number.
    y[j] = to == DType::f16 && isfinite(x[j]) ? fminf(fmaxf(x[j], -65504.0F), 65504.0F) : x[j];
  }
  round_elements(to, y);
  store_elements(high, to, i * 4, y);
  if (low == nullptr) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) y[j] = x[j] - y[j];
  store_elements(low, to, i * 4, y);
}

/// Grid (any, 1 or 2): rows of the first tensor, and of the second.
__global__ void gather_kernel(TensorView first, TensorView second, size_t quads, uint32_t heads,
                              uint32_t dim, DType to, void* first_rows, void* second_rows,
                              size_t head_stride) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= quads) return;
  const Place p(i, heads, dim);
  float x[4];
  load_quad(blockIdx.y == 0 ? first : second, p, x);
  store_elements(blockIdx.y == 0 ? first_rows : second_rows, to,
                 p.head * head_stride + p.token * dim + p.at, x);
}

__global__ void unpack_kernel(const int8_t* from, const uint16_t* scales, uint32_t which,
                              uint32_t scale_heads, size_t quads, uint32_t rows, uint32_t dim,
                              DType to, void* out) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= quads) return;
  const uint32_t per = dim / 4;
  const size_t at = i % per * 4, row = i / per % rows, head = i / per / rows;
  const char4 levels = *reinterpret_cast<const char4*>(from + i * 4);
  const uint16_t* scale = scales + ((row / kScaleRows * scale_heads + head) * 2 + which) * dim + at;
  const float x[4] = {static_cast<float>(levels.x) * load_element(scale, DType::bf16, 0),
                      static_cast<float>(levels.y) * load_element(scale, DType::bf16, 1),
                      static_cast<float>(levels.z) * load_element(scale, DType::bf16, 2),
                      static_cast<float>(levels.w) * load_element(scale, DType::bf16, 3)};
  store_elements(out, to, i * 4, x);
}

__global__ void finish_kernel(const float* o, const float2* sums, size_t quads, uint32_t heads,
                              uint32_t dim, float unit, const float* sinks, TensorOut out,
                              float* lse) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= quads) return;
  const Place p(i, heads, dim);
  const float2 sum = sums[p.token * heads + p.head];
  const auto q = blocked::QueryEnd::of(unit, sinks, static_cast<uint32_t>(p.head), sum.x, sum.y);
  const float4 x = reinterpret_cast<const float4*>(o)[i];
  const float y[4] = {x.x * q.scale, x.y * q.scale, x.z * q.scale, x.w * q.scale};
  store_elements(out.data, out.dtype, p.token * out.token_stride + p.head * out.head_stride + p.at,
                 y);
  if (lse != nullptr && p.at == 0) lse[p.token * heads + p.head] = q.lse;
}

/// A warp for a query of a head.
__global__ void merge_kernel(float* o, float2* sums, uint32_t parts, uint32_t queries, uint32_t dim,
                             float to_base2) {
  const uint32_t lane = threadIdx.x % 32, at = (blockIdx.x * kThreads + threadIdx.x) / 32;
  if (at >= queries) return;
  float top = kMinusInf;
  for (uint32_t i = 0; i < parts; ++i) top = fmaxf(top, sums[size_t{i} * queries + at].x);
  const float base = finite_base(top);
  float total = 0.0F;
  for (uint32_t i = 0; i < parts; ++i) {
    const float2 sum = sums[size_t{i} * queries + at];
    total = fmaf(exp2f((sum.x - base) * to_base2), sum.y, total);
  }
  for (uint32_t j = 4 * lane; j < dim; j += 128) {
    float4 y{};
#pragma unroll 4
    for (uint32_t i = 0; i < parts; ++i) {
      const size_t from = size_t{i} * queries + at;
      const float weight = exp2f((sums[from].x - base) * to_base2);
      const float4 x = *reinterpret_cast<const float4*>(o + from * dim + j);
      y.x = fmaf(weight, x.x, y.x), y.y = fmaf(weight, x.y, y.y);
      y.z = fmaf(weight, x.z, y.z), y.w = fmaf(weight, x.w, y.w);
    }
    *reinterpret_cast<float4*>(o + size_t{at} * dim + j) = y;
  }
  __syncwarp();
  if (lane == 0) sums[at] = make_float2(top, total);
}

// Over the bus: 16 thread blocks with 64 bytes of each thread under way are 262 KB, three times what 55 GB/s and 1.5 us
// need.
constexpr uint32_t kFetchBlocks = 16;
constexpr uint32_t kAtOnce = 4;

__global__ void fetch_kernel(const uint4* from, size_t stride, size_t pieces, size_t all,
                             uint4* to) {
  const size_t step = size_t{gridDim.x} * kThreads;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += kAtOnce * step) {
    uint4 x[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const size_t at = i + j * step;
      if (at < all) x[j] = __ldcv(from + at / pieces * stride + at % pieces);
    }
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      if (i + j * step < all) to[i + j * step] = x[j];
    }
  }
}

}  // namespace

void launch_fetch(const std::byte* from, size_t stride, uint32_t heads, size_t bytes, std::byte* to,
                  cudaStream_t stream) {
  const size_t pieces = bytes / sizeof(uint4);
  fetch_kernel<<<kFetchBlocks, kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(from),
                                                      stride / sizeof(uint4), pieces,
                                                      pieces * heads, reinterpret_cast<uint4*>(to));
  check_launch("fetching rows from the host");
}

void launch_split_rows(const TensorView& from, DType to, void* high, void* low, uint32_t* bad,
                       cudaStream_t stream) {
  const size_t quads = from.tokens * from.heads * from.dim / 4;
  split_kernel<<<blocks_for(quads), kThreads, 0, stream>>>(from, quads, from.heads, from.dim, to,
                                                           high, low, bad);
  check_launch("splitting rows of blocked attention");
}

void launch_gather_rows(const TensorView& from, DType to, void* rows, size_t head_stride,
                        cudaStream_t stream) {
  const size_t quads = from.tokens * from.heads * from.dim / 4;
  gather_kernel<<<blocks_for(quads), kThreads, 0, stream>>>(from, from, quads, from.heads, from.dim,
                                                            to, rows, rows, head_stride);
  check_launch("new rows of blocked attention");
}

void launch_gather_rows(const TensorView& k, const TensorView& v, DType to, void* keys,
                        void* values, size_t head_stride, cudaStream_t stream) {
  const size_t quads = k.tokens * k.heads * k.dim / 4;
  gather_kernel<<<dim3(blocks_for(quads), 2), kThreads, 0, stream>>>(k, v, quads, k.heads, k.dim,
                                                                     to, keys, values, head_stride);
  check_launch("new rows of blocked attention");
}

void launch_unpack_rows(const std::byte* from, const uint16_t* scales, uint32_t which,
                        uint32_t scale_heads, uint32_t rows, uint32_t heads, uint32_t dim, DType to,
                        void* out, cudaStream_t stream) {
  const size_t quads = size_t{rows} * heads * dim / 4;
  unpack_kernel<<<blocks_for(quads), kThreads, 0, stream>>>(
      reinterpret_cast<const int8_t*>(from), scales, which, scale_heads, quads, rows, dim, to, out);
  check_launch("rows in int8 of blocked attention");
}

void launch_merge_states(float* o, float2* sums, uint32_t parts, uint32_t n, uint32_t heads,
                         uint32_t dim, float unit, cudaStream_t stream) {
  const uint32_t queries = n * heads;
  merge_kernel<<<blocks_for(size_t{queries} * 32), kThreads, 0, stream>>>(o, sums, parts, queries,
                                                                          dim, unit * kLog2E);
  check_launch("merging the parts of blocked attention");
}

void launch_finish_blocked(const float* o, const float2* sums, uint32_t n, uint32_t heads,
                           uint32_t dim, float unit, const float* sinks, const TensorOut& out,
                           float* lse, cudaStream_t stream) {
  const size_t quads = size_t{n} * heads * dim / 4;
  finish_kernel<<<blocks_for(quads), kThreads, 0, stream>>>(o, sums, quads, heads, dim, unit, sinks,
                                                            out, lse);
  check_launch("the end of blocked attention");
}

}  // namespace keyhole::gpu
