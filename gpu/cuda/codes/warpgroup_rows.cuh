// Which query rows the lanes of a warpgroup have in its pass over codes (gpu/cuda/codes/warpgroup.cuh), and what a
// lane, or a warp, knows for them of its rows of codes.
#pragma once

#include "gpu/cuda/codes/combined_rows.cuh"

namespace keyhole::gpu::codes {

/// A number as an integer with the same order, or the other way round.
__device__ inline int ordered(float x) {
  const int y = __float_as_int(x);
  return y ^ (y >> 31 & 0x7FFFFFFF);
}
__device__ inline float from_ordered(int y) { return __int_as_float(y ^ (y >> 31 & 0x7FFFFFFF)); }

/// Shape: a GroupShape.
template <class Shape>
struct GroupRows {
  static constexpr int kTiles = Shape::kTiles, kParts = Shape::kParts;

  /// Of rows of codes, for some query rows: the largest logit, the sum of the weights, and that of these times value
  /// factors, as they are multiplied with.
  template <int kCount>
  struct RowValues {
    float largest[kCount], sums[kCount], scaled[kCount];

    __device__ void join(const RowValues& other) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        largest[i] = fmaxf(largest[i], other.largest[i]);
        sums[i] += other.sums[i];
        scaled[i] += other.scaled[i];
      }
    }
  };
  using LaneRows = RowValues<kTiles>;  ///< of a lane's rows, for query row lane % 4 of each tile
  using WarpRows = RowValues<kParts>;  ///< of a warp's rows, for GroupPass::row_of()

  /// Combines what the lanes have.
  __device__ static WarpRows combined(const LaneRows& rows) {
    const auto add = [](float x, float y) { return x + y; };
    WarpRows y;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      y.sums[part] = combined_rows(part_of(rows.sums, part).x, add);
      y.scaled[part] = combined_rows(part_of(rows.scaled, part).x, add);
      y.largest[part] = combined_rows(part_of(rows.largest, part).x,
                                      [](float x, float y) { return fmaxf(x, y); });
    }
    return y;
  }
  struct Part {
    float x[Shape::kPartTiles];
  };
  __device__ static Part part_of(const float (&x)[kTiles], int part) {
    Part y;
#pragma unroll
    for (int i = 0; i < Shape::kPartTiles; ++i) y.x[i] = x[part * Shape::kPartTiles + i];
    return y;
  }

  /// The query row whose scores tile t has in a lane, and where query row h is among those, tile by tile: rows of two
  /// tiles take turns, so that a lane has weights of neighbours.
  [[nodiscard]] __device__ static constexpr int row_at(int t, int lane) {
    return 8 * (t / 2) + 2 * (lane % 4) + t % 2;
  }
  [[nodiscard]] __device__ static int place_of(int h) {
    return 4 * (2 * (h / 8) + h % 2) + h % 8 / 2;
  }
};

}  // namespace keyhole::gpu::codes
