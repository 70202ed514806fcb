// Symmetric int8 quantisation of rows: x ~ scale * q, q in [-127, 127].
#pragma once

#include "cpu/kernels.h"

namespace keyhole::cpu {

/// Quantises one fp32 row of `dim`: scale = max|x| / 127 (0 for an all-zero row). Round to nearest even.
/// Returns the scale. The error per element is at most scale / 2.
float quantise_row(const float* src, uint32_t dim, int8_t* dst);

/// Quantises every row of `src`; dst is `[count, dim]` contiguous, scales `[count]`.
void quantise_rows(const Kernels& kernels, const RowsView& src, int8_t* dst, float* scales);

}  // namespace keyhole::cpu
