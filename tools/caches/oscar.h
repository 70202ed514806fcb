// OSCAR: turned by a matrix that was fitted to what attention consumes, clipped, and rounded to 2 bits.
//
// Zhou et al., "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization" (arXiv 2605.17757).
// Of each KV head, row x becomes y = x R with R = U H P: U are the eigenvectors of Q^T Q for keys and of
// V^T S^T S V for values (S: the softmax weights), H is the orthonormal Walsh-Hadamard matrix, P puts channels in the
// order of their reversed bits. Numbers of y beyond a quantile of the row's magnitudes are clipped to it, then each 128
// channels share a step and a zero point. The first 64 tokens and the newest 512 are in 16 bits. Rotations
// and quantiles come from a calibration: oscar_fit.h.
//
// What differs: the newest age in runs of 32 tokens (here 512 to 543 of them are in 16 bits), and 16 bits are fp16, not
// bf16. Nothing here was held against the authors' code.
#pragma once

#include <memory>
#include <vector>

#include "tools/caches/aging_format.h"

namespace keyhole::tools {

/// What is fitted for the keys, or the values, of one KV head.
struct OscarTurn {
  std::vector<float> rotation;  ///< R `[d, d]`, row-major, orthonormal
  float quantile = 1.0F;  ///< of the row's magnitudes, above which numbers are clipped; 1: none are
};
struct OscarHead {
  OscarTurn keys, values;
};

/// Bits: 2 of a number, and 32 of each min(128, head_dim). Throws as aging_layout() where head_dim is no power of two
/// from 32 on.
[[nodiscard]] AgingLayout oscar_layout(uint32_t head_dim);
/// heads: `[layers, kv_heads]`.
[[nodiscard]] std::shared_ptr<const AgingFormat> make_oscar(std::vector<OscarHead> heads,
                                                            uint32_t kv_heads, uint32_t head_dim);

/// Replaces rows `[count, dim]` by what 2 bits behind this turn give back.
void pass_oscar(const OscarTurn& turn, float* rows, size_t count, size_t dim);
/// The magnitude at which a row of `dim` numbers is clipped: its magnitudes in rising order, at place floor(quantile *
/// dim), the last at most.
[[nodiscard]] float clip_threshold(const float* row, size_t dim, float quantile);

}  // namespace keyhole::tools
