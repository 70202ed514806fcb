// Where every bit of a block of codes lies: one layout for the host, files and the device, in the order in which
// the tensor cores want it, so that a block is encoded once and copied as it is.
//
// CODES. K and V of 256 consecutive tokens of one KV head are one block. Keys lie in the balanced space of their
// head (index/scan/balance.h), values in units of their head's spread; both are rotated (signs and Hadamard
// transforms). A rotated row is its block's mean plus a residual r, each component of which is rounded to one of 2^b
// odd integers
//     level = 2 u + 1 - 2^b,   u in 0 .. 2^b - 1          (b = 2: -3, -1, 1, 3)
// of which u is stored. One number per row gives the size back:
//     key factor    f = <r,r> / <r,level>:        f * <q, level> is an unbiased estimate of <q, r> (RaBitQ)
//     value factor  g = <r,level> / <level,level>:  g * level is the nearest multiple to r (least squares)
//
// A BLOCK in memory, each part aligned to 16 bytes:
//     key codes    [16 tiles][32 lanes][key_words]      uint32
//     value codes  [16 tiles][32 lanes][value_words]    uint32; none with value_bits = 0
//     factors      [16 tiles][16 rows][f, g]            fp16
//     key mean     [dim] fp16, balanced and rotated
//     value mean   [dim] fp16, divided by the head's value scale and rotated
//     noise        fp32: mean over the block's keys of |r/f - level|^2 / dim, see index/scan/kv_codes.h
// A tile is 16 rows. `lane` is a thread of the warp that multiplies the tile.
//   Keys are the 16 x 32 matrix A of mma.m16n8k32 (8-bit), in steps of 16 components: step s has two registers, of rows
//   lane/4 + 8 r for r = 0, 1, with bytes j = 0..3 of component 16 s + 4 (lane mod 4) + j. Both lie at the same bits of
//   two words: word 2 (s div n) + r has n = 8/b steps, step s at bits b (s mod n) of every byte. So a mask alone
//   makes a register of u 2^(b (s mod n)), and the query's components of the step are divided by that power.
//   Values are the 16 x 16 matrix A of mma.m16n8k16 (16-bit), transposed: register 4 m + a holds halves j = 0, 1 of
//   component 16 m + lane/4 + 8 (a mod 2), row 2 (lane mod 4) + j + 8 (a div 2). A word has 16/b registers, the first
//   in the lowest bits of both halves.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KEYHOLE_ANYWHERE __host__ __device__ constexpr
#else
#define KEYHOLE_ANYWHERE constexpr
#endif

namespace keyhole {

inline constexpr uint32_t kCodeBlock = 256;  ///< rows
inline constexpr uint32_t kCodeTile = 16;    ///< rows
inline constexpr uint32_t kCodeTiles = kCodeBlock / kCodeTile;
inline constexpr uint32_t kCodeLanes = 32;

/// Where one code lies: bits [shift, shift + bits) of a word of its tile's codes.
struct CodePlace {
  uint32_t word;
  uint32_t shift;
};

struct CodeShape {
  uint32_t dim = 0;         ///< a multiple of 16 from 64 to 576
  uint32_t key_bits = 0;    ///< 1, 2, 4
  uint32_t value_bits = 0;  ///< 0 (the block's mean stands for its values), 1, 2, 4

  /// Steps of 16 components, an even number: a product takes two.
  [[nodiscard]] KEYHOLE_ANYWHERE uint32_t key_steps() const { return (dim + 31) / 32 * 2; }
  [[nodiscard]] KEYHOLE_ANYWHERE uint32_t key_words() const {
    const uint32_t steps_per_word = 8 / key_bits;
    return 2 * ((dim / 16 + steps_per_word - 1) / steps_per_word);
  }
  [[nodiscard]] KEYHOLE_ANYWHERE uint32_t value_words() const {
    return value_bits == 0 ? 0 : (dim / 4 * value_bits + 15) / 16;
  }

  [[nodiscard]] KEYHOLE_ANYWHERE size_t key_bytes() const {
    return size_t{kCodeTiles} * kCodeLanes * key_words() * 4;
  }
  [[nodiscard]] KEYHOLE_ANYWHERE size_t value_bytes() const {
    return size_t{kCodeTiles} * kCodeLanes * value_words() * 4;
  }
  [[nodiscard]] KEYHOLE_ANYWHERE size_t values_at() const { return key_bytes(); }
  [[nodiscard]] KEYHOLE_ANYWHERE size_t factors_at() const { return values_at() + value_bytes(); }
  [[nodiscard]] KEYHOLE_ANYWHERE size_t key_mean_at() const {
    return factors_at() + size_t{kCodeBlock} * 4;
  }
  [[nodiscard]] KEYHOLE_ANYWHERE size_t value_mean_at() const {
    return key_mean_at() + size_t{dim} * 2;
  }
  [[nodiscard]] KEYHOLE_ANYWHERE size_t noise_at() const {
    return value_mean_at() + size_t{dim} * 2;
  }
  /// Bytes of a block: a multiple of 128, so that every block begins at a cache line.
  [[nodiscard]] KEYHOLE_ANYWHERE size_t block_bytes() const {
    return (noise_at() + 4 + 127) / 128 * 128;
  }

  /// Where the key code of row `row` (0..15) of a tile lies.
  [[nodiscard]] KEYHOLE_ANYWHERE CodePlace key_place(uint32_t row, uint32_t component) const {
    const uint32_t lane = row % 8 * 4 + component % 16 / 4;
    const uint32_t step = component / 16;
    const uint32_t per_word = 8 / key_bits;
    return {lane * key_words() + 2 * (step / per_word) + row / 8,
            component % 4 * 8 + step % per_word * key_bits};
  }
  /// Where the value code of row `row` (0..15) of a tile lies.
  [[nodiscard]] KEYHOLE_ANYWHERE CodePlace value_place(uint32_t row, uint32_t component) const {
    const uint32_t lane = component % 8 * 4 + row % 8 / 2;
    const uint32_t reg = component / 16 * 4 + row / 8 * 2 + component % 16 / 8;
    const uint32_t per_word = 16 / value_bits;
    return {lane * value_words() + reg / per_word, row % 2 * 16 + reg % per_word * value_bits};
  }
};

/// What a level of 1 is worth, in standard deviations: half of the step between levels that loses least of a normal
/// distribution (Max 1960).
[[nodiscard]] KEYHOLE_ANYWHERE float code_step(uint32_t bits) {
  return bits == 1 ? 0.7979F : bits == 2 ? 0.4978F : 0.1676F;
}

/// The largest factor, and component of a mean, of values. Kernels sum up 32 weights times factors in fp16, each of a
/// weight that passes the running maximum by no more than 4 where factors are large: 16 * 4 * 1023 is 65,472, and
/// single ones pass it by 64. A value by its code, the mean and 15 times the factor at most, is a number of fp16, too.
/// A run of rows with larger ones has kUnknownNoise.
inline constexpr float kMostValueFactor = 1023.0F, kMostValueMean = 50000.0F;

/// The most that the noise of a key's code takes from the log weight of its row: half of a variance of 2. The logit
/// by code is unbiased; half its variance is the first term of a series that makes sense for variances up to some
/// units (the variance of the weight is e^variance - 1). Without the bound the term outgrows the logit, because it is
/// quadratic in the sizes of queries and keys and the logit is linear: of long keys the shortest would weigh most.
/// Rows that codes cannot tell beyond it are read exactly (index/scan/code_scan_doubt.cpp).
inline constexpr float kMostNoiseBias = 1.0F;

/// The sign by which a component of a row is multiplied before a pass of the rotation. The pattern is fixed and looks
/// random; it differs between passes, because two equal passes would undo each other.
[[nodiscard]] KEYHOLE_ANYWHERE float code_sign(uint32_t pass, uint32_t component) {
  uint32_t x = (pass * 256 + component + 1) * 0x9E3779B1U;
  x ^= x >> 15;
  x *= 0x85EBCA77U;
  x ^= x >> 13;
  return (x >> 7 & 1U) != 0 ? -1.0F : 1.0F;
}

/// One pass of the rotation: signs, then a Hadamard transform of `size` components from `begin` on. The passes follow
/// one another. A head dimension that is no power of 2 takes transforms of the largest power of 2 below it, at its
/// beginning and at its end in turn. Each pass after the first multiplies the difference in width between the two
/// ends by (dim - size) / size; there are as many passes as leave a quarter of it, and at least 3. (With two passes
/// over 80 components, components keep spreads of their own, and scores by code come out 3 % too small.)
struct HadamardPass {
  uint32_t begin, size;
};
[[nodiscard]] KEYHOLE_ANYWHERE uint32_t hadamard_size(uint32_t dim) {
  return dim >= 512 ? 512 : dim >= 256 ? 256 : dim >= 128 ? 128 : 64;
}
[[nodiscard]] KEYHOLE_ANYWHERE uint32_t hadamard_passes(uint32_t dim) {
  const uint32_t size = hadamard_size(dim);
  if (size == dim) return 1;
  uint32_t passes = 3;
  const float each = static_cast<float>(dim - size) / static_cast<float>(size);
  for (float left = each * each; left > 0.25F; left *= each) ++passes;  // NOLINT: no count
  return passes;
}
[[nodiscard]] KEYHOLE_ANYWHERE HadamardPass hadamard_pass(uint32_t dim, uint32_t i) {
  const uint32_t size = hadamard_size(dim);
  return {i % 2 == 0 ? 0 : dim - size, size};
}

}  // namespace keyhole

#undef KEYHOLE_ANYWHERE
