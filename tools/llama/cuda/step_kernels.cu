#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/reduce.cuh"
#include "tools/llama/cuda/step_kernels.h"

namespace keyhole::tools::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ void begin_kernel(const StepInput* input, Split table, uint32_t width,
                             const double* frequencies, uint32_t half, float* hidden,
                             float2* turns) {
  const StepInput in = *input;
  const size_t row = size_t{in.token} * width;
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) {
    const float high = __bfloat162float(table.high[row + i]);
    hidden[i] = table.low == nullptr ? high : high + __bfloat162float(table.low[row + i]);
  }
  for (uint32_t i = threadIdx.x; i < half; i += kThreads) {
    double sine, cosine;
    sincos(in.position * frequencies[i], &sine, &cosine);
    turns[i] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
  }
}

/// Adds 8 products; the weights are 16 bytes of bf16, the upper halves of fp32 numbers.
__device__ inline float dot8(const uint4& w, const float4& x, const float4& y, float sum) {
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); };
  sum = fmaf(low(w.x), x.x, sum);
  sum = fmaf(high(w.x), x.y, sum);
  sum = fmaf(low(w.y), x.z, sum);
  sum = fmaf(high(w.y), x.w, sum);
  sum = fmaf(low(w.z), y.x, sum);
  sum = fmaf(high(w.z), y.y, sum);
  sum = fmaf(low(w.w), y.z, sum);
  return fmaf(high(w.w), y.w, sum);
}

/// Two rows of W times x, in every lane of the warp; x in shared memory.
__device__ float2 two_rows(const StepMatrix& w, uint32_t row0, uint32_t row1, const float* x) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t pieces = w.columns / 8;
  const auto at = [&](const __nv_bfloat16* base, uint32_t row) {
    return reinterpret_cast<const uint4*>(base + size_t{row} * w.columns);
  };
  float2 sum = make_float2(0.0F, 0.0F);
  for (int part = 0; part < (w.w.low == nullptr ? 1 : 2); ++part) {
    const __nv_bfloat16* const base = part == 0 ? w.w.high : w.w.low;
    const uint4* const w0 = at(base, row0);
    const uint4* const w1 = at(base, row1);
#pragma unroll 4
    for (uint32_t i = lane; i < pieces; i += 32) {
      const float4 a = reinterpret_cast<const float4*>(x)[2 * i];
      const float4 b = reinterpret_cast<const float4*>(x)[2 * i + 1];
      sum.x = dot8(__ldg(w0 + i), a, b, sum.x);
      sum.y = dot8(__ldg(w1 + i), a, b, sum.y);
    }
  }
  return make_float2(warp_sum(sum.x), warp_sum(sum.y));
}

/// x to shared memory, normalised where there is a norm.
__device__ void load_input(const float* x, uint32_t n, const Norm& norm, float* shared) {
  if (norm.weight == nullptr) {
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) shared[i] = x[i];
    __syncthreads();
    return;
  }
  float squares = 0.0F;
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    const float value = x[i];
    squares += value * value;
    shared[i] = value * norm.weight[i];
  }
  const float scale = 1.0F / sqrtf(block_sum<kThreads>(squares) / static_cast<float>(n) + norm.eps);
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) shared[i] *= scale;
  __syncthreads();
}

/// Which rows of W a warp takes, and what becomes of the two numbers (y0 is a row's, y1 the other's).
struct Rotate {
  const float2* turns;
  uint32_t half, rotated_heads;
  __device__ uint2 rows(uint32_t pair, uint32_t) const {
    const uint32_t row = pair / half * 2 * half + pair % half;
    return make_uint2(row, row + half);
  }
  __device__ void write(float* y, uint2 rows, float2 value) const {
    if (rows.x / (2 * half) < rotated_heads) {
      const float2 turn = turns[rows.x % (2 * half)];
      value = make_float2(value.x * turn.x - value.y * turn.y, value.y * turn.x + value.x * turn.y);
    }
    y[rows.x] = value.x;
    y[rows.y] = value.y;
  }
};
struct Gate {
  __device__ uint2 rows(uint32_t pair, uint32_t count) const {
    return make_uint2(pair, pair + count / 2);
  }
  __device__ void write(float* y, uint2 rows, float2 value) const {
    y[rows.x] = value.x / (1.0F + __expf(-value.x)) * value.y;
  }
};
template <bool add>
struct Neighbours {
  __device__ uint2 rows(uint32_t pair, uint32_t count) const {
    return make_uint2(2 * pair, min(2 * pair + 1, count - 1));
  }
  __device__ void write(float* y, uint2 rows, float2 value) const {
    if (add) value = make_float2(value.x + y[rows.x], value.y + y[rows.y]);
    y[rows.x] = value.x;
    y[rows.y] = value.y;
  }
};

template <class Pairs>
__global__ void __launch_bounds__(kThreads)
    step_kernel(StepMatrix w, const float* x, Norm norm, Pairs pairs, float* y) {
  extern __shared__ __align__(16) float input[];
  load_input(x, w.columns, norm, input);
  const uint32_t pair = blockIdx.x * kWarps + threadIdx.x / 32;
  if (pair >= (w.rows + 1) / 2) return;
  const uint2 rows = pairs.rows(pair, w.rows);
  const float2 value = two_rows(w, rows.x, rows.y, input);
  if (threadIdx.x % 32 == 0) pairs.write(y, rows, value);
}

template <class Pairs>
void launch(const StepMatrix& w, const float* x, const Norm& norm, const Pairs& pairs, float* y,
            cudaStream_t stream) {
  const size_t shared = w.columns * sizeof(float);
  if (shared > 48 << 10) {
    check(cudaFuncSetAttribute(step_kernel<Pairs>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)),
          "shared memory of a step's product");
  }
  const uint32_t count = (w.rows + 1) / 2;
  step_kernel<<<(count + kWarps - 1) / kWarps, kThreads, shared, stream>>>(w, x, norm, pairs, y);
  check_launch("a step's product");
}

}  // namespace

void begin_step(const StepInput* input, const Split& table, uint32_t width,
                const double* frequencies, uint32_t half, float* hidden, float2* turns,
                cudaStream_t stream) {
  begin_kernel<<<1, kThreads, 0, stream>>>(input, table, width, frequencies, half, hidden, turns);
  check_launch("embedding");
}

void step_qkv(const StepMatrix& w, const float* x, const Norm& norm, const float2* turns,
              uint32_t half, uint32_t rotated_heads, float* qkv, cudaStream_t stream) {
  launch(w, x, norm, Rotate{turns, half, rotated_heads}, qkv, stream);
}
void step_add(const StepMatrix& w, const float* x, float* y, cudaStream_t stream) {
  launch(w, x, {}, Neighbours<true>{}, y, stream);
}
void step_gate_up(const StepMatrix& w, const float* x, const Norm& norm, float* y,
                  cudaStream_t stream) {
  launch(w, x, norm, Gate{}, y, stream);
}
void step_logits(const StepMatrix& w, const float* x, const Norm& norm, float* y,
                 cudaStream_t stream) {
  launch(w, x, norm, Neighbours<false>{}, y, stream);
}

}  // namespace keyhole::tools::cuda
