// Asymmetric rounding to a few bits: numbers that share a step and a zero point, as KIVI, KVarN and OSCAR have them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keyhole::tools {

/// Bits that a group's step and zero point take, both fp16.
inline constexpr double kAffineGroupBits = 32.0;

/// Replaces the group numbers[0], numbers[stride], ... of `count` numbers by `scale` times what their codes give back:
/// with zero = min and step = (max - min) / (2^bits - 1), x has the code round((x - zero) / step), and scale * zero and
/// scale * step are kept as fp16 (KIVI, arXiv 2402.02750, section 2: zero point and scale of a group). A group of equal
/// numbers has a step of 0. A group with a NaN or an infinity, or whose step or zero point is too large for fp16,
/// becomes NaN as a whole, so that it shows. bits: 1 to 8. Any thread; allocates nothing.
void round_affine(float* numbers, size_t count, size_t stride, unsigned bits, float scale = 1.0F);

}  // namespace keyhole::tools
