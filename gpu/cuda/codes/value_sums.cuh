// Sums of weighted values by tensor cores: value codes as the subnormal fp16 numbers that they are where they lie, and
// what of the products a lane has.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/cuda/common/tensor_core.cuh"

namespace keyhole::gpu::codes {

constexpr float kHeadroom = 6.0F;  // log2: by how much a logit may pass the running maximum

/// Where value codes come to lie in two fp16 numbers of a register, by a shift and a mask. Registers with an odd
/// number, which hold components 8 and more of a product's 16, have another place where that saves a shift.
template <int kBits>
struct ValuePlaces;
template <>
struct ValuePlaces<2> {
  static constexpr uint32_t kEvenMask = 0x03000300U, kOddMask = 0x00C000C0U;
  __host__ __device__ static constexpr int left(int sub) {
    return sub % 2 == 0 ? 8 - 2 * sub : 6 - 2 * sub;
  }
};
template <>
struct ValuePlaces<4> {
  static constexpr uint32_t kEvenMask = 0x03C003C0U, kOddMask = 0x03C003C0U;
  __host__ __device__ static constexpr int left(int sub) { return 6 - 4 * sub; }
};

/// Codes alone are subnormal fp16 numbers u / unit. Tensor cores multiply these exactly, and as fast as others.
template <int kBits>
struct ValueUnits {
  static constexpr float kOdd = 262144.0F, kEven = kBits == 2 ? 65536.0F : kOdd;
};

/// The value codes of a register. rest: the fp16 bits beside the codes.
template <int kBits, int kWords>
__device__ inline uint32_t value_register(const uint32_t (&words)[kWords], int reg,
                                          uint32_t rest = 0) {
  using Places = ValuePlaces<kBits>;
  constexpr int kPer = 16 / kBits;
  const int left = Places::left(reg % kPer);
  const uint32_t word = words[reg / kPer];
  const uint32_t moved = left >= 0 ? word << left : word >> -left;
  // This is one instruction, (moved & mask) | rest, as long as `rest` is 0 or in a register.
  return (moved & (reg % 2 == 0 ? Places::kEvenMask : Places::kOddMask)) | rest;
}

/// Sums of weighted values by products of 8 columns: a warp's lane has components 16 m + lane/4 and 16 m + lane/4 + 8
/// of head 4 t + lane % 4, for all t and m.
///
/// With 4 heads the columns hold their weights in fp16 and the rounding errors of these. With more heads two tiles
/// share the columns, with weights in fp16 alone (errors of 2^-12 of each, no more than rounding an output to fp16
/// causes), for half the products and registers.
template <int kDim, int kHeadTiles>
struct ValueSums {
  static constexpr bool kShares = kHeadTiles > 1;
  static constexpr int kColumns = kShares ? kHeadTiles / 2 : kHeadTiles;
  static constexpr int kProducts = kDim / 16;  ///< 16 components each
  using Products = float[kColumns][kProducts][4];

  /// Makes the b registers of a tile's weights w, of rows lane/4 (x) and lane/4 + 8 (y), and adds the weights to
  /// `sums` as the products have them.
  __device__ static void take_weights(const float2 (&w)[kHeadTiles], float (&sums)[kHeadTiles],
                                      uint32_t (&b)[kColumns][2]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kShares) {
        const __half2 x = __floats2half2_rn(w[2 * c].x, w[2 * c + 1].x);
        const __half2 y = __floats2half2_rn(w[2 * c].y, w[2 * c + 1].y);
        sums[2 * c] += __low2float(x) + __low2float(y);
        sums[2 * c + 1] += __high2float(x) + __high2float(y);
        b[c][0] = transposed(packed(__low2half(x), __high2half(x)));
        b[c][1] = transposed(packed(__low2half(y), __high2half(y)));
      } else {
        const __half x = __float2half_rn(w[c].x), y = __float2half_rn(w[c].y);
        sums[c] += w[c].x + w[c].y;
        b[c][0] = transposed(packed(x, __float2half_rn(w[c].x - __half2float(x))));
        b[c][1] = transposed(packed(y, __float2half_rn(w[c].y - __half2float(y))));
      }
    }
  }
  __device__ static void scale(Products& acc, int t, float by) {
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!kShares || i % 2 == t % 2) acc[kShares ? t / 2 : t][m][i] *= by;
      }
    }
  }
  /// Adds x and y to the two components that a lane has of a product.
  __device__ static void add(Products& acc, int t, int m, float x, float y) {
    float* to = acc[kShares ? t / 2 : t][m] + (kShares ? t % 2 : 0);
    to[0] += x;
    to[2] += y;
  }
  __device__ static float2 of(const Products& acc, int t, int m) {
    const float* from = acc[kShares ? t / 2 : t][m];
    if constexpr (kShares)
      return {from[t % 2], from[t % 2 + 2]};
    else
      return {from[0] + from[1], from[2] + from[3]};
  }
};

}  // namespace keyhole::gpu::codes
