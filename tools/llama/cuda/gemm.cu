// A block computes 128 x 128 elements; its 8 warps 64 x 32 each. Four stages of 32 columns of k are on their way
// through shared memory at a time. The terms of the split numbers are further columns of k: one sum in registers.
#include "tools/llama/cuda/gemm.h"
#include "tools/llama/cuda/memory.h"
#include "tools/llama/cuda/mma.cuh"

namespace keyhole::tools::cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kThreads = 256;
constexpr int kTile = 128;  // rows of x, and of w
constexpr int kDepth = 32;  // columns of a stage
constexpr int kStages = 4;
constexpr int kPitch =
    kDepth + 8;  // 80 bytes: the 8 rows of an ldmatrix hit 8 different groups of banks
constexpr int kWarpRows = 64, kWarpColumns = 32;
constexpr size_t kSharedBytes = sizeof(Bf16) * kStages * 2 * kTile * kPitch;

__device__ void fetch(Bf16* shared, const Bf16* global, uint32_t first, uint32_t rows,
                      uint32_t column, uint32_t k) {
  constexpr int kPieces = kDepth / 8;
#pragma unroll
  for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
    const uint32_t piece = i * kThreads + threadIdx.x;
    const uint32_t row = piece / kPieces;
    const uint32_t at = piece % kPieces * 8;
    const bool there = first + row < rows && column + at < k;
    copy_async(shared + row * kPitch + at,
               global + (there ? size_t{first + row} * k + column + at : 0), there);
  }
}

__global__ void __launch_bounds__(kThreads, 2) gemm_kernel(const GemmArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* const x_stages = reinterpret_cast<Bf16*>(shared_bytes);
  Bf16* const w_stages = x_stages + kStages * kTile * kPitch;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 4 * kWarpRows;
  const int warp_column = warp % 4 * kWarpColumns;
  const uint32_t first_row = blockIdx.y * kTile;
  const uint32_t first_column = blockIdx.x * kTile;

  const uint32_t steps_per_term = (a.k + kDepth - 1) / kDepth;
  const uint32_t terms = a.w.low == nullptr ? 2 : 3;
  const uint32_t steps = terms * steps_per_term;
  const auto fetch_step = [&](uint32_t step) {
    if (step < steps) {
      const uint32_t term = step / steps_per_term;
      const uint32_t column = step % steps_per_term * kDepth;
      const uint32_t stage = step % kStages;
      fetch(x_stages + stage * kTile * kPitch, term == 1 ? a.x.low : a.x.high, first_row, a.m,
            column, a.k);
      fetch(w_stages + stage * kTile * kPitch, term == 2 ? a.w.low : a.w.high, first_column, a.n,
            column, a.k);
    }
    commit_copies();  // an empty group keeps the count
  };

  for (int step = 0; step < kStages - 1; ++step) fetch_step(step);
  float c[kWarpRows / 16][kWarpColumns / 8][4] = {};
  for (uint32_t step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();  // this step's stage has come, and the last one's may be overwritten
    fetch_step(step + kStages - 1);
    const uint32_t stage = step % kStages;
    const Bf16* const x_lane =
        x_stages + stage * kTile * kPitch + (warp_row + lane % 16) * kPitch + lane / 16 * 8;
    const Bf16* const w_lane = w_stages + stage * kTile * kPitch +
                               (warp_column + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
      uint32_t w_part[kWarpColumns / 16][4];
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        load_matrices(w_part[j], w_lane + j * 16 * kPitch + part * 16);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        uint32_t x_part[4];
        load_matrices(x_part, x_lane + i * 16 * kPitch + part * 16);
#pragma unroll
        for (int j = 0; j < kWarpColumns / 16; ++j) {
          multiply_add(c[i][2 * j], x_part, w_part[j][0], w_part[j][1], a.x.high);
          multiply_add(c[i][2 * j + 1], x_part, w_part[j][2], w_part[j][3], a.x.high);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = first_row + warp_row + i * 16 + lane / 4 + half * 8;
      if (row >= a.m) continue;
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j) {
        const uint32_t column = first_column + warp_column + j * 8 + lane % 4 * 2;
        if (column >= a.n) continue;
        auto* const to = reinterpret_cast<float2*>(a.c + size_t{row} * a.n + column);
        float2 sum = make_float2(c[i][j][2 * half], c[i][j][2 * half + 1]);
        if (a.add) {
          const float2 former = *to;
          sum.x += former.x;
          sum.y += former.y;
        }
        *to = sum;
      }
    }
  }
}

}  // namespace

void gemm(const GemmArgs& args, cudaStream_t stream) {
  if (args.n % 8 != 0 || args.k % 8 != 0) {
    throw std::runtime_error("GPU product: n is " + std::to_string(args.n) + ", k is " +
                             std::to_string(args.k) + "; allowed: multiples of 8");
  }
  check(cudaFuncSetAttribute(gemm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kSharedBytes)),
        "shared memory of the product");
  const dim3 grid((args.n + kTile - 1) / kTile, (args.m + kTile - 1) / kTile);
  gemm_kernel<<<grid, kThreads, kSharedBytes, stream>>>(args);
  check_launch("product");
}

}  // namespace keyhole::tools::cuda
