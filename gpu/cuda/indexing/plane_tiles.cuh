// Tiles of scores of fp32 rows on tensor cores. A number is the sum of three bf16 ones (8 bits each: all 24 of its
// mantissa); of the nine products of two numbers' planes the six largest are formed. The rest is below 2^-24 of the
// product, the rounding of fp32 itself. It has a third of the speed of a tf32 product, which is right to 11 bits.
#pragma once

#include "gpu/cuda/common/async_copy.cuh"
#include "gpu/cuda/common/tensor_core.cuh"
#include "gpu/cuda/indexing/neighbour_epilogue.cuh"

namespace keyhole::gpu {

/// Pipeline of slices of 16 elements of a row in three planes; both operands pass through shared memory in such
/// slices.
struct PlanePipeline {
  static constexpr int kSliceBytes = 3 * 16 * 2;
  static constexpr int kRowBytes = kSliceBytes + 16;  // 112: 8 rows at once lie in different banks
  static constexpr int kQueryBytes = kTileQueries * kRowBytes;
  static constexpr int kStageBytes = kQueryBytes + kTileKeys * kRowBytes;
  static constexpr int kStages = 2;
  static constexpr size_t kBytes = size_t{kStages} * kStageBytes;
};

/// Streams tiles [0, tiles) of 64 keys past the block's 256 queries. query_row(i): the planes of query i of the
/// block; key_row(tile, i): those of key i of a tile; null: zeros. take(scores, tile) gets each tile in the layout of
/// Keeper.
template <class QueryRow, class KeyRow, class Take>
__device__ inline void stream_planes(unsigned char* shared, uint32_t slices, uint32_t tiles,
                                     const void* anything, QueryRow query_row, KeyRow key_row,
                                     Take take) {
  using P = PlanePipeline;
  const uint32_t t = threadIdx.x;
  const uint32_t lane = t % 32;
  const uint32_t base = shared_address(shared);
  const uint32_t total = tiles * slices;
  const auto load = [&](uint32_t at) {
    if (at < total) {
      const uint32_t slice = at % slices;
      const uint32_t stage = base + at % P::kStages * P::kStageBytes;
      constexpr uint32_t kPieces = P::kSliceBytes / 16;
      for (uint32_t i = t; i < (kTileQueries + kTileKeys) * kPieces; i += kTileQueries) {
        const uint32_t row = i / kPieces;
        const uint32_t piece = i % kPieces;
        const uint16_t* from =
            row < kTileQueries ? query_row(row) : key_row(at / slices, row - kTileQueries);
        const bool is_there = from != nullptr;
        copy_async(stage + row * P::kRowBytes + piece * 16,
                   is_there ? static_cast<const void*>(from + slice * 48 + piece * 8) : anything,
                   is_there);
      }
    }
    commit_copies();
  };
  load(0);
  const uint32_t a_offset = (t / 32 * 32 + lane % 16) * P::kRowBytes + lane / 16 * 16;
  const uint32_t b_offset =
      P::kQueryBytes + (lane % 8 + lane / 16 * 8) * P::kRowBytes + lane / 8 % 2 * 16;
  uint32_t at = 0;
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    float scores[2][8][4] = {};
    for (uint32_t slice = 0; slice < slices; ++slice, ++at) {
      wait_for_copies<0>();
      __syncthreads();
      load(at + 1);
      const uint32_t stage = base + at % P::kStages * P::kStageBytes;
      uint32_t a[3][2][4];
#pragma unroll
      for (int p = 0; p < 3; ++p) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
          load_matrices(a[p][m], stage + a_offset + m * 16 * P::kRowBytes + p * 32);
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t b[3][4];
#pragma unroll
        for (int p = 0; p < 3; ++p)
          load_matrices(b[p], stage + b_offset + pair * 16 * P::kRowBytes + p * 32);
        // Small products are added first.
        constexpr int kOf[6][2] = {{1, 1}, {0, 2}, {2, 0}, {0, 1}, {1, 0}, {0, 0}};
#pragma unroll
        for (int product = 0; product < 6; ++product) {
          const auto& x = a[kOf[product][0]];
          const auto& y = b[kOf[product][1]];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply_add<__nv_bfloat16>(scores[m][2 * pair], x[m], y[0], y[1]);
            multiply_add<__nv_bfloat16>(scores[m][2 * pair + 1], x[m], y[2], y[3]);
          }
        }
      }
    }
    take(scores, tile);
  }
}

}  // namespace keyhole::gpu
