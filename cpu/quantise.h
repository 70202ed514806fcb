// Symmetric int8 quantisation of a row: x ~ scale * q, q in [-127, 127].
#pragma once

#include <cstdint>

namespace keyhole::cpu {

/// Quantises one fp32 row of `dim`: scale = max|x| / 127 (0 for an all-zero row). Round to nearest even.
/// Returns the scale. The error per element is at most scale / 2.
float quantise_row(const float* src, uint32_t dim, int8_t* dst);

}  // namespace keyhole::cpu
