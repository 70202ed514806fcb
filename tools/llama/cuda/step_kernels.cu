#include <algorithm>

#include "tools/cuda/early_launch.cuh"
#include "tools/cuda/row_pair.cuh"
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

/// A vector in shared memory, as RowPair wants it.
struct SharedVector {
  float4* quads;
  float scale = 1.0F;  ///< that the numbers are still to be multiplied by

  /// By all threads of a block: x, times the weights of `norm` where there is one.
  __device__ SharedVector(const float* x, uint32_t n, const Norm& norm, void* shared)
      : quads(static_cast<float4*>(shared)) {
    float squares = 0.0F;
    for (uint32_t i = threadIdx.x; i < n / 4; i += kThreads) {
      float4 v = reinterpret_cast<const float4*>(x)[i];
      if (norm.weight != nullptr) {
        const float4 by = reinterpret_cast<const float4*>(norm.weight)[i];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        v = make_float4(v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w);
      }
      quads[place_of_quad(i, n)] = v;
    }
    if (norm.weight != nullptr) {
      scale = 1.0F / sqrtf(block_sum<kThreads>(squares) / static_cast<float>(n) + norm.eps);
    } else {
      __syncthreads();
    }
  }
};

/// The rows of W that a warp takes, and the use of the two numbers (y0 is one row's, y1 the other's).
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

/// Launched early: weights are asked for before the kernel in front has ended.
template <class Pairs>
__global__ void __launch_bounds__(kThreads, 2)
    step_kernel(StepMatrix w, uint32_t stride, const float* x, Norm norm, Pairs pairs, float* y) {
  extern __shared__ __align__(16) unsigned char memory[];
  start_next_kernel();
  const uint32_t count = (w.rows + 1) / 2;
  const uint32_t pair = blockIdx.x * kWarps + threadIdx.x / 32;
  const uint2 rows = pairs.rows(min(pair, count - 1), w.rows);
  RowPair high(w.w.high, rows, w.columns, stride);
  wait_for_inputs();
  const SharedVector input(x, w.columns, norm, memory);
  if (pair >= count) return;
  float2 sum = make_float2(0.0F, 0.0F);
  high.multiply(input.quads, sum);
  if (w.w.low != nullptr) RowPair(w.w.low, rows, w.columns, stride).multiply(input.quads, sum);
  sum = make_float2(warp_sum(sum.x) * input.scale, warp_sum(sum.y) * input.scale);
  if (threadIdx.x % 32 == 0) pairs.write(y, rows, sum);
}

/// stride: numbers from a row of the matrix to the next.
template <class Pairs>
void launch(const StepMatrix& w, uint32_t stride, const float* x, const Norm& norm,
            const Pairs& pairs, float* y, cudaStream_t stream) {
  const size_t shared = w.columns * sizeof(float);
  if (shared > 48 << 10) {
    check(cudaFuncSetAttribute(step_kernel<Pairs>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)),
          "shared memory of a step's product");
  }
  const uint32_t count = (w.rows + 1) / 2;
  check(early_launch(step_kernel<Pairs>, dim3((count + kWarps - 1) / kWarps), dim3(kThreads),
                     shared, stream, w, stride, x, norm, pairs, y),
        "a step's product");
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
  launch(w, w.columns, x, norm, Rotate{turns, half, rotated_heads}, qkv, stream);
}
void step_add(const StepMatrix& w, const float* x, float* y, cudaStream_t stream) {
  // The columns of most models go in one launch; larger ones' down projections as even parts, each of which adds to y.
  // A thread block keeps its part of x in shared memory, of which GPUs for desktops have 99 KiB.
  constexpr uint32_t kMostColumns = 24576;
  static_assert(kMostColumns * sizeof(float) <= size_t{99} << 10U);
  const uint32_t parts = (w.columns + kMostColumns - 1) / kMostColumns;
  const uint32_t each = (w.columns / 8 + parts - 1) / parts * 8;
  for (uint32_t first = 0; first < w.columns; first += each) {
    const __nv_bfloat16* const low = w.w.low == nullptr ? nullptr : w.w.low + first;
    const StepMatrix part{{w.w.high + first, low}, w.rows, std::min(each, w.columns - first)};
    launch(part, w.columns, x + first, {}, Neighbours<true>{}, y, stream);
  }
}
void step_gate_up(const StepMatrix& w, const float* x, const Norm& norm, float* y,
                  cudaStream_t stream) {
  launch(w, w.columns, x, norm, Gate{}, y, stream);
}
void step_logits(const StepMatrix& w, const float* x, const Norm& norm, float* y,
                 cudaStream_t stream) {
  launch(w, w.columns, x, norm, Neighbours<false>{}, y, stream);
}

}  // namespace keyhole::tools::cuda
