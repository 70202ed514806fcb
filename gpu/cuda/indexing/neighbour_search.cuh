// Tiles of scores for 16-bit keys. A thread block holds 256 queries in registers, as operands of the tensor cores (32
// queries for each of its 8 warps, whole rows), and streams keys past them through shared memory. Every warp sees
// every key of the share, so that the lists of its queries are its own and no two warps ever write to the same.
//
// The speed of mma.sync is bounded here by the arithmetic per byte of shared memory: a warp reads 64 keys (16 KiB at
// dim 128) for 32 x 64 scores, 16 multiply-adds per byte, 2048 per cycle and multiprocessor; the instruction itself
// gives some 1300 on Hopper.
#pragma once

#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/indexing/neighbour_epilogue.cuh"

namespace keyhole::gpu {

template <int Steps>
struct Pipeline {
  static constexpr int kDim = 16 * Steps;
  /// Bytes from row to row, 16 more than a row has: the 8 rows that ldmatrix reads at once then lie in different
  /// banks for every dim that is an odd multiple of 16 bytes away from a multiple of 128.
  static constexpr int kRowBytes = 2 * kDim + 16;
  static constexpr int kStageBytes = kTileKeys * kRowBytes + kTileKeys * sizeof(float);
  static constexpr int kStages = kStageBytes <= 22 * 1024 ? 4 : 2;
  static constexpr size_t kBytes = size_t{kStages} * kStageBytes + sizeof(QueryTile);
};

template <class T, int Steps>
__global__ void __launch_bounds__(kTileQueries, 1) search_tiles(const TileArgs args) {
  using P = Pipeline<Steps>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto& tile = *reinterpret_cast<QueryTile*>(shared + P::kStages * P::kStageBytes);
  if (!begin_tile(args, tile)) return;
  const uint32_t t = threadIdx.x;
  const uint32_t lane = t % 32;
  const bool sample = args.maxima != nullptr;
  const bool has_extra = args.key_extra != nullptr;

  // The rows of the block, or of its sample, that this share covers.
  const uint32_t seen = tile.furthest > args.first_key ? tile.furthest - args.first_key : 0;
  const uint32_t rows =
      sample ? (args.key_count + kSampleEvery - 1) / kSampleEvery : min(args.key_count, seen);
  const uint32_t begin = blockIdx.y * args.share_keys;
  const uint32_t end = min(begin + args.share_keys, rows);
  const uint32_t steps = begin < end ? (end - begin + kTileKeys - 1) / kTileKeys : 0;
  if (sample ? steps == 0 : begin >= end) {
    if (!sample && tile.limit[t] != 0)
      args.list_sizes[size_t{tile.row[t]} * args.shares + blockIdx.y] = 0;
    return;
  }

  // Whole rows of 32 queries, operand A of every product.
  uint32_t a[Steps][2][4];
  const uint32_t slot = t / 32 * 32 + lane / 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = slot + 16 * m + 8 * h;
      const bool is_there = tile.limit[at] != 0;
      const auto* row =
          reinterpret_cast<const uint32_t*>(args.queries + size_t{tile.row[at]} * P::kDim);
#pragma unroll
      for (int k = 0; k < Steps; ++k) {
        a[k][m][h] = is_there ? row[8 * k + lane % 4] : 0;
        a[k][m][2 + h] = is_there ? row[8 * k + 4 + lane % 4] : 0;
      }
    }
  }

  const uint32_t base = shared_address(shared);
  const auto load = [&](uint32_t step) {
    if (step < steps) {
      constexpr int kPieces = 2 * Steps;  // of 16 bytes, per row
      const uint32_t stage = base + step % P::kStages * P::kStageBytes;
#pragma unroll
      for (uint32_t i = t; i < kTileKeys * kPieces; i += kTileQueries) {
        const uint32_t row = i / kPieces;
        const uint32_t piece = i % kPieces;
        const uint32_t at = begin + step * kTileKeys + row;
        const uint32_t key = sample ? min(sampled_key(at), args.key_count - 1) : at;
        const bool is_there = at < end;
        copy_async(stage + row * P::kRowBytes + piece * 16,
                   args.keys + (is_there ? key * args.key_stride + piece * 16 : 0), is_there);
      }
      if (has_extra && t < kTileKeys) {
        const uint32_t at = begin + step * kTileKeys + t;
        const uint32_t key = sample ? min(sampled_key(at), args.key_count - 1) : at;
        copy_async_4(stage + kTileKeys * P::kRowBytes + t * 4,
                     args.key_extra + (at < end ? key : 0), at < end);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < P::kStages - 1; ++s) load(s);

  Keeper keeper(args, tile);
  // ldmatrix: lanes 0-7, 8-15, 16-23, 24-31 give the rows of four 8 x 8 matrices: keys 0-7 and 8-15 of a pair of
  // column tiles, each with elements 0-7 and 8-15 of a step.
  const uint32_t lane_offset = (lane % 8 + lane / 16 * 8) * P::kRowBytes + lane / 8 % 2 * 16;
  for (uint32_t step = 0; step < steps; ++step) {
    wait_for_copies<P::kStages - 2>();
    __syncthreads();
    load(step + P::kStages - 1);  // into the stage that all warps have left
    const uint32_t stage_at = step % P::kStages * P::kStageBytes;
    const uint32_t stage = base + stage_at + lane_offset;
    float scores[2][8][4] = {};
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t b[4];
        load_matrices(b, stage + pair * 16 * P::kRowBytes + k * 32);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(scores[m][2 * pair], a[k][m], b[0], b[1]);
          multiply_add<T>(scores[m][2 * pair + 1], a[k][m], b[2], b[3]);
        }
      }
    }
    const uint32_t row = begin + step * kTileKeys;
    keeper.take(scores, args.first_key + (sample ? 0 : row), row / kTileKeys,
                has_extra
                    ? reinterpret_cast<const float*>(shared + stage_at + kTileKeys * P::kRowBytes)
                    : nullptr);
  }
  if (!sample && tile.limit[t] != 0) {
    args.list_sizes[size_t{tile.row[t]} * args.shares + blockIdx.y] = tile.size[t];
  }
}

template <class T, int Steps>
cudaError_t launch_steps(const TileArgs& args, cudaStream_t stream) {
  using P = Pipeline<Steps>;
  static_assert(P::kBytes <= size_t{99} << 10U);
  const cudaError_t error =
      cudaFuncSetAttribute(search_tiles<T, Steps>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(P::kBytes));
  if (error != cudaSuccess) return error;
  const dim3 grid((args.rows + kTileQueries - 1) / kTileQueries, args.shares);
  search_tiles<T, Steps><<<grid, kTileQueries, P::kBytes, stream>>>(args);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_dim(const TileArgs& args, cudaStream_t stream) {
  switch (args.dim) {
    case 64: return launch_steps<T, 4>(args, stream);
    case 80: return launch_steps<T, 5>(args, stream);
    case 96: return launch_steps<T, 6>(args, stream);
    case 128: return launch_steps<T, 8>(args, stream);
    case 256: return launch_steps<T, 16>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace keyhole::gpu
